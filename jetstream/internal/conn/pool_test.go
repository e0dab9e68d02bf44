package conn

import "testing"

func TestOldServersAreTold(t *testing.T) {
	t.Parallel()
	for version, old := range map[string]bool{"2.10.29": true, "2.11.0": false, "2.15.2": false, "3.0.0": false, "1.4.1": true, "": true, "two": true} {
		if tooOld(version) != old {
			t.Errorf("%q: too old is %v", version, !old)
		}
	}
}
