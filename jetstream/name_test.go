package jetstream

import (
	"strings"
	"testing"
	"testing/quick"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/native"
)

func TestKeyTokenRoundTrip(t *testing.T) {
	t.Parallel()
	check := func(key string) bool {
		token := keyToken(key)
		if key != "" && !natsserver.IsValidLiteralSubject(token) || strings.ContainsAny(token, ".*> ") {
			t.Logf("key %q gives token %q", key, token)
			return false
		}
		return tokenKey(token) == key
	}
	for _, key := range []string{"local:stt:1234", "a.b", "a b", "=", "=41", "==", "ключ", "a\x00b", "*", ">", "$JS", strings.Repeat("k", 512)} {
		if !check(key) {
			t.Errorf("key %q does not survive", key)
		}
	}
	if err := quick.Check(check, nil); err != nil {
		t.Error(err)
	}
	if got := keyToken("local:stt:1234"); got != "local=3Astt=3A1234" {
		t.Errorf("keyToken: got %s", got)
	}
}

// A native client may write any token: it has a key all the same.
func TestTokenKeyOfForeignTokens(t *testing.T) {
	t.Parallel()
	for token, want := range map[string]string{"plain": "plain", "=": "=", "=4": "=4", "=zz": "=zz", "=3a": "=3a", "a=41": "aA", "a:b": "a:b"} {
		if got := tokenKey(token); got != want {
			t.Errorf("tokenKey(%q) = %q, want %q", token, got, want)
		}
	}
}

func TestObjectNamesAreDistinctWhereCaseIsFolded(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 300)
	names := []string{"ops", "Ops", "OPS", "o.ps", "o ps", "o=ps", "=4F", "\x4f", "ops~2", "ops@a", long, long + "y", strings.ToUpper(long), "дом", "Дом"}
	seen := map[string]string{}
	for _, n := range names {
		got := strings.ToLower(objectName(n))
		if other, ok := seen[got]; ok && other != n {
			t.Errorf("%q and %q share the name %s", n, other, got)
		}
		seen[got] = n
		if len(got) > native.MaxObjectName || strings.ContainsAny(got, ".*>/\\ \t") {
			t.Errorf("%q gives the unusable name %s", n, got)
		}
	}
}

func TestValidTopic(t *testing.T) {
	t.Parallel()
	for _, ok := range []string{"a", "a.b", "A-1_b.c", strings.Repeat("a", 251)} {
		if err := ValidTopic(ok); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, bad := range []string{"", ".", "a.", ".a", "a..b", "a b", "a.*", ">", "a.>", "$JS.API", "a\n", "é", strings.Repeat("a", 252), strings.Repeat("a", 1<<20)} {
		err := ValidTopic(bad)
		if e, ok := err.(*event.Error); !ok || e.Code != event.CodeBadTopic || len(e.Msg) > 200 { //nolint:errorlint // the type itself is the contract
			t.Errorf("%.20q: got %v", bad, err)
		}
	}
}

func TestValidGroup(t *testing.T) {
	t.Parallel()
	for _, ok := range []string{"g", "a group", "груп", "a.b>*", strings.Repeat("g", 128)} {
		if err := ValidGroup(ok); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, bad := range []string{"", "a\tb", "a\x00", "\xff", "a\u0085", strings.Repeat("g", 129)} {
		if ValidGroup(bad) == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestParseAckSubject(t *testing.T) {
	t.Parallel()
	want := conn.DeliveryMeta{Delivered: 3, StreamSeq: 42, Order: 7, StoredAt: 1700000000000000001}
	for _, s := range []string{
		"$JS.ACK.a=2Eb.grp.3.42.7.1700000000000000001.5",
		"$JS.ACK._.hash.a=2Eb.grp.3.42.7.1700000000000000001.5",
		"$JS.ACK.hub.hash.a=2Eb.grp.3.42.7.1700000000000000001.5.token",
	} {
		want.Prefix = strings.Index(s, ".grp.") + len(".grp.")
		if got, ok := conn.ParseAckSubject(s); !ok || got != want {
			t.Errorf("%s: got %+v, %v", s, got, ok)
		}
	}
	for _, s := range []string{"", "_INBOX.a.b", "$JS.ACK.a.b.c", "$JS.ACK.s.c.x.42.7.1.5", "$JS.ACK.s.c.1.42.7.1.5.6", strings.Repeat(".", 40)} {
		if _, ok := conn.ParseAckSubject(s); ok {
			t.Errorf("%s is accepted", s)
		}
	}
}

func TestFenceKeepsItsOrder(t *testing.T) {
	t.Parallel()
	for _, ackWait := range []time.Duration{time.Second, 3 * time.Second, 15 * time.Second, 30 * time.Second, time.Hour} {
		f := newFence(ackWait)
		if f.retry <= 0 || f.touch <= f.retry || f.usable <= f.touch || ackWait <= f.usable {
			t.Errorf("%v: %+v", ackWait, f)
		}
		if limit := stallLimit(ackWait); limit >= ackWait-f.usable || limit <= 0 {
			t.Errorf("%v: a stall of %v goes unnoticed", ackWait, limit)
		}
	}
	if f := newFence(30 * time.Second); f.touch != 20*time.Second || f.usable != 25*time.Second {
		t.Errorf("30s: %+v", f)
	}
}
