package schemas_test

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// Register two versions of a schema, publish events of both, and consume them in the latest one.
func ExampleRegistry() {
	ctx := context.Background()
	server, err := embedded.Start(ctx, embedded.Config{}) // in memory
	if err != nil {
		panic(err)
	}
	rules := topics.Rules{{Pattern: "hosts", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce}}}
	bus, err := jetstream.Open(ctx, jetstream.Config{Server: server, Topics: rules})
	if err != nil {
		panic(err)
	}
	defer func() { _ = bus.Close() }()

	registry := bus.Schemas()
	publish := func(payload string) {
		if _, err := bus.Publish(ctx, "hosts", []byte(payload), jetstream.PublishOptions{}); err != nil {
			fmt.Println(err)
		}
	}
	register := func(draft schemas.Draft) {
		if _, _, err := registry.Register(ctx, "hosts", draft); err != nil {
			fmt.Println(err)
		}
	}
	register(schemas.Draft{
		Schema: json.RawMessage(`{"type":"object","required":["host"],"properties":{"host":{"type":"string"}},"additionalProperties":false}`),
	})
	publish(`{"host":"web-1"}`)
	publish(`{"host":1}`)
	register(schemas.Draft{
		Schema: json.RawMessage(`{"type":"object","required":["name"],"properties":{"name":{"type":"string"}},"additionalProperties":false}`),
		Up:     json.RawMessage(`[{"rename":{"at":"/host","to":"name","required":true}}]`),
	})
	publish(`{"name":"web-2"}`)

	came := make(chan string)
	opts := jetstream.SubscribeOptions{From: jetstream.FromEarliest, SchemaVersion: schemas.Latest}
	sub, err := bus.Consume(ctx, "hosts", "inventory", opts, func(_ context.Context, d *jetstream.Delivery) error {
		came <- d.Event.Headers["x-schema-version"] + " " + string(d.Event.Payload)
		return nil
	})
	if err != nil {
		panic(err)
	}
	fmt.Println(<-came)
	fmt.Println(<-came)
	if err := sub.Stop(ctx); err != nil {
		panic(err)
	}
	// Output:
	// schema_invalid: version 1, /host: type
	// 2 {"name":"web-1"}
	// 2 {"name":"web-2"}
}
