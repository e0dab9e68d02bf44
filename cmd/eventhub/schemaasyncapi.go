package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"eventhub/jetstream/schema/asyncapi"
)

// schemaAsyncAPICmd is `eventhub schema asyncapi`.
type schemaAsyncAPICmd struct {
	httpFlags

	Topics []string `arg:"" optional:"" help:"Topics. Default: all topics that have schemas."`
}

// Run prints the document as JSON.
func (cmd *schemaAsyncAPICmd) Run(ctx context.Context, std streams) error {
	names := slices.Compact(slices.Sorted(slices.Values(cmd.Topics)))
	if len(names) == 0 {
		all, err := cmd.schemaTopics(ctx)
		if err != nil {
			return err
		}
		for _, t := range all {
			names = append(names, t.Topic)
		}
	}
	topics := make([]asyncapi.Topic, 0, len(names))
	for _, name := range names {
		t, err := cmd.topic(ctx, name)
		if err != nil {
			return err
		}
		topics = append(topics, t)
	}
	text, err := asyncapi.Document(topics)
	if err != nil {
		return err
	}
	_, err = std.out.Write(text)
	return err
}

// topic reads all versions of a topic.
func (cmd *schemaAsyncAPICmd) topic(ctx context.Context, name string) (t asyncapi.Topic, err error) {
	of := schemaFlags{cmd.httpFlags, name}
	var list struct{ Latest int }
	if err := of.call(ctx, http.MethodGet, "", nil, &list); err != nil {
		return t, err
	}
	if list.Latest == 0 {
		return t, fmt.Errorf("topic %s has no schema; register one with eventhub schema put", name)
	}
	t.Name = name
	for n := range list.Latest {
		var v struct {
			Schema      json.RawMessage
			Description string
		}
		if err := of.call(ctx, http.MethodGet, "/"+strconv.Itoa(n+1), nil, &v); err != nil {
			return t, err
		}
		t.Versions = append(t.Versions, asyncapi.Version{Schema: v.Schema, Description: v.Description})
	}
	return t, nil
}
