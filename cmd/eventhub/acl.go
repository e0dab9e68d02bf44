package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"eventhub/acl"
)

// Exit codes of `eventhub acl check`.
const (
	exitDenied = 1
	exitUnsure = 2 // no decision: invalid command line, configuration, or token
)

// aclCmd is `eventhub acl`.
type aclCmd struct {
	Check aclCheckCmd `cmd:"" help:"Check whether a token allows an action on a topic, and show the deciding rule. Exit code: 0 allowed, 1 denied, 2 token not accepted."`
}

// aclCheckCmd is `eventhub acl check`.
type aclCheckCmd struct {
	Hub authFlags `embed:"" group:"The hub's configuration"`

	HubToken     string `env:"WS_TOKEN" group:"The hub's configuration" help:"The hub's own token."`
	HubTokenFile string `env:"WS_TOKEN_FILE" group:"The hub's configuration" placeholder:"FILE" help:"File with the hub's own token."`
	TopicsFile   string `name:"topics" env:"EVENTHUB_TOPICS" group:"The hub's configuration" placeholder:"FILE" help:"Topics file, whose snapshot topics count as their topics."`

	Token     string `help:"Token to check; - reads it from standard input. Other users of this host can see command lines."`
	TokenFile string `placeholder:"FILE" help:"File with the token to check."`
	Group     string `help:"Group, for the action subscribe."`
	Action    string `arg:"" enum:"publish,subscribe,inspect,admin" help:"Action: ${enum}."`
	Topic     string `arg:"" help:"Topic."`
}

// Run prints the decision.
func (cmd *aclCheckCmd) Run(ctx context.Context, std streams) error {
	decision, err := cmd.decide(ctx, std)
	if err != nil {
		return &exitError{exitUnsure, err}
	}
	if _, err := fmt.Fprintln(std.out, decision); err != nil {
		return &exitError{exitUnsure, &outputError{err}}
	}
	if !decision.Allowed {
		return &exitError{exitDenied, nil}
	}
	return nil
}

func (cmd *aclCheckCmd) decide(ctx context.Context, std streams) (acl.Decision, error) {
	if p, err := acl.ParsePattern(cmd.Topic); err != nil || !p.Match(cmd.Topic) {
		return acl.Decision{}, fmt.Errorf("%q is not a valid topic; use up to 251 bytes, in segments of letters, digits, _ and - separated by dots, without wildcards", cmd.Topic)
	}
	if cmd.Group != "" && acl.Action(cmd.Action) != acl.Subscribe {
		return acl.Decision{}, errors.New("--group is only allowed with the action subscribe")
	}
	token, err := cmd.token(std.in)
	if err != nil {
		return acl.Decision{}, err
	}
	own, err := tokenFlags{cmd.HubToken, cmd.HubTokenFile}.configured()
	if err != nil {
		return acl.Decision{}, err
	}
	cfg, err := cmd.Hub.config(own)
	if err != nil {
		return acl.Decision{}, err
	}
	rules, err := busFlags{TopicsFile: cmd.TopicsFile, NATSURL: "any"}.rules()
	if err != nil {
		return acl.Decision{}, err
	}
	cfg.Snapshots = snapshotTopics(rules)
	cfg.Logger = slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
	v, err := acl.NewVerifier(ctx, cfg)
	if err != nil {
		return acl.Decision{}, fmt.Errorf("%w (WS_TOKEN, JWT_SECRET, JWT_SECRET_FILE, JWT_JWKS_URL)", err)
	}
	defer v.Close()
	id, err := v.Verify(ctx, token)
	if err != nil {
		return acl.Decision{}, fmt.Errorf("token not accepted: %s", strings.TrimSuffix(err.Error(), "."))
	}
	return id.Policy().Decide(acl.Action(cmd.Action), cmd.Topic, cmd.Group), nil
}

// token reads the token to check.
func (cmd *aclCheckCmd) token(in io.Reader) (string, error) {
	switch {
	case (cmd.Token != "") == (cmd.TokenFile != ""):
		return "", errors.New("no token to check; use either --token or --token-file; --token - reads standard input")
	case cmd.TokenFile != "":
		f, err := os.Open(cmd.TokenFile)
		if err != nil {
			return "", fmt.Errorf("token file %s: %w", cmd.TokenFile, cause(err))
		}
		defer func() { _ = f.Close() }() // read-only
		in = f
	case cmd.Token != "-":
		return cmd.Token, nil
	}
	// The extra byte reveals a token that is too long.
	text, err := io.ReadAll(io.LimitReader(in, acl.MaxTokenBytes+1))
	if err != nil {
		return "", fmt.Errorf("read token: %w", cause(err))
	}
	return strings.TrimSpace(string(text)), nil
}
