package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"eventhub/jetstream"
)

// groupCmd is `eventhub group`.
type groupCmd struct {
	Delete groupDeleteCmd `cmd:"" help:"Delete a group with its position."`
}

// groupFlags name a group of the running hub.
type groupFlags struct {
	opsFlags

	Topic string `arg:"" help:"Topic."`
	Group string `arg:"" help:"Group."`
}

// called names the group for people.
func (f *groupFlags) called() string {
	return "the group " + strconv.Quote(f.Group) + " of " + f.Topic
}

// call asks the hub about the group. rest follows the group in the path.
func (f *groupFlags) call(ctx context.Context, method string, body, into any, rest ...string) error {
	if err := errors.Join(jetstream.ValidTopic(f.Topic), jetstream.ValidGroup(f.Group)); err != nil {
		return err
	}
	hub, err := f.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	needs := "admin on " + f.Topic
	if method == http.MethodGet {
		needs = "subscribe or " + needs
	}
	return hub.call(ctx, opsCall{method: method, path: append([]string{"groups", f.Topic, f.Group}, rest...), body: body, needs: needs}, into)
}

// groupDeleteCmd is `eventhub group delete`.
type groupDeleteCmd struct {
	groupFlags
	yesFlag
}

// Run deletes the group.
func (cmd *groupDeleteCmd) Run(ctx context.Context, std streams) error {
	if err := cmd.confirm(std, "delete "+cmd.called()+" with its position and its bookmarks"); err != nil {
		return err
	}
	if err := cmd.call(ctx, http.MethodDelete, nil, nil); err != nil {
		return err
	}
	_, err := fmt.Fprintln(std.out, "deleted "+cmd.called())
	return err
}
