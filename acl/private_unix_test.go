//go:build unix

package acl

import (
	"io/fs"
	"testing"
)

func TestSecretsOfRootThatAGroupMayRead(t *testing.T) {
	const root, user, volume, other = 0, 1000, 3000, 3001
	for _, c := range []struct {
		mode               fs.FileMode
		group, user, first int
		want               bool
	}{
		{0o440, volume, root, root, true},
		{0o640, volume, root, root, true},
		{0o440, volume, user, user, true},
		{0o440, other, root, root, false},
		{0o440, root, root, root, true},
		{0o640, root, root, root, false},
		{0o440, user, root, user, false}, // the first group may be that of all users
	} {
		if got := groupMayRead(c.mode, c.group, c.user, c.first, []int{c.first, volume}); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
