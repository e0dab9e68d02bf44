package acl_test

import (
	"strings"
	"testing"
	"time"

	"eventhub/acl"
)

func TestSignedTokensAreTaken(t *testing.T) {
	v := newVerifier(t, acl.Config{Secret: secret, Audience: "hub", Issuer: "me"})
	token, err := acl.Sign(secret, acl.Grant{
		Subject: "dev", Scopes: []string{"publish:a"}, TTL: time.Minute, Audience: "hub", Issuer: "me",
		Policy: policyOf(ruleOf("allow", "admin", "b")),
	})
	if err != nil {
		t.Fatal(err)
	}
	id, err := v.Verify(t.Context(), token)
	if err != nil {
		t.Fatal(err)
	}
	left := time.Until(id.Expires()) - acl.Leeway
	if id.Name() != "dev" || id.Allows(acl.Publish, "a", "") || !id.Allows(acl.Admin, "b", "") || left < 50*time.Second || left > time.Minute {
		t.Errorf("%s %v", id.Name(), left)
	}
}

func TestSignRefusesWhatVerifyWould(t *testing.T) {
	rules := make([]string, 300)
	for i := range rules {
		rules[i] = ruleOf("allow", "publish", "topic.number")
	}
	for want, c := range map[string]struct {
		secret []byte
		grant  acl.Grant
	}{
		"openssl rand -hex 32":     {secret[:31], acl.Grant{TTL: time.Hour}},
		"below 1 second":           {secret, acl.Grant{}},
		"scope 1: there is no":     {secret, acl.Grant{TTL: time.Hour, Scopes: []string{"publish"}}},
		"policy: it is not a JSON": {secret, acl.Grant{TTL: time.Hour, Policy: []byte(`[]`)}},
		"subject has more than":    {secret, acl.Grant{TTL: time.Hour, Subject: strings.Repeat("a", 257)}},
		"16384 are allowed":        {secret, acl.Grant{TTL: time.Hour, Policy: policyOf(rules...)}},
	} {
		if _, err := acl.Sign(c.secret, c.grant); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
