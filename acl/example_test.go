package acl_test

import (
	"context"
	"fmt"
	"time"

	"eventhub/acl"
)

// Accept a static token, and JWTs that another service signs.
func ExampleVerifier() {
	secret := []byte("0123456789abcdef0123456789abcdef")
	v, err := acl.NewVerifier(context.Background(), acl.Config{
		Static: []acl.StaticToken{{Name: "operator", Token: "change-me"}},
		Secret: secret,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer v.Close()

	token, err := acl.Sign(secret, acl.Grant{Subject: "sensor-7", Scopes: []string{"publish:heartbeat.*"}, TTL: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	id, err := v.Verify(context.Background(), token)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(id.Name(), "may publish:", id.Allows(acl.Publish, "heartbeat.received", ""))
	fmt.Println(id.Name(), "may subscribe:", id.Allows(acl.Subscribe, "heartbeat.received", "g"))

	_, err = v.Verify(context.Background(), "wrong")
	fmt.Println(err)
	// Output:
	// sensor-7 may publish: true
	// sensor-7 may subscribe: false
	// bad_token: The token is not valid.
}

// A policy says which rule decided.
func ExamplePolicy_Decide() {
	p, err := acl.ParsePolicy([]byte(`{"rules": [
		{"effect": "deny",  "action": "*",         "topics": ["billing.**"]},
		{"effect": "allow", "action": "subscribe", "topics": ["**"], "groups": ["dashboard"]}
	]}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(p.Decide(acl.Subscribe, "process.state", "dashboard"))
	fmt.Println(p.Decide(acl.Subscribe, "billing.paid", "dashboard"))
	fmt.Println(p.Decide(acl.Publish, "process.state", ""))
	// Output:
	// allowed by rule 2: allow subscribe ** groups "dashboard"
	// denied by rule 1: deny * billing.**
	// denied by default: no rule matches
}
