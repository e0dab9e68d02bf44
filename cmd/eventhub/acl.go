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

// The exit codes of `eventhub acl check`.
const (
	exitDenied = 1
	exitUnsure = 2 // no decision: the command line, the configuration or the token is wrong
)

// aclCmd is `eventhub acl`.
type aclCmd struct {
	Check aclCheckCmd `cmd:"" help:"Say whether a token allows an action on a topic, and by which rule. Exit code: 0 allowed, 1 denied, 2 the token is not taken."`
}

// aclCheckCmd is `eventhub acl check`.
type aclCheckCmd struct {
	Hub authFlags `embed:"" group:"The hub's configuration"`

	HubToken     string `env:"WS_TOKEN" group:"The hub's configuration" help:"The hub's own token."`
	HubTokenFile string `env:"WS_TOKEN_FILE" group:"The hub's configuration" placeholder:"FILE" help:"File that holds the hub's own token."`

	Token     string `help:"The token to check; - reads it from standard input. Other users of this host can read it on a command line."`
	TokenFile string `placeholder:"FILE" help:"File that holds the token to check."`
	Group     string `help:"The group of a subscribe."`
	Action    string `arg:"" enum:"publish,subscribe,admin" help:"What to do: ${enum}."`
	Topic     string `arg:"" help:"The topic."`
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
		return acl.Decision{}, fmt.Errorf("%q is no topic: segments of letters, digits, _ and - are separated by dots, 251 bytes in all, without wildcards", cmd.Topic)
	}
	if cmd.Group != "" && acl.Action(cmd.Action) != acl.Subscribe {
		return acl.Decision{}, errors.New("--group is for subscribe")
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
	cfg.Logger = slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
	v, err := acl.NewVerifier(ctx, cfg)
	if err != nil {
		return acl.Decision{}, fmt.Errorf("%w (WS_TOKEN, JWT_SECRET, JWT_SECRET_FILE, JWT_JWKS_URL)", err)
	}
	defer v.Close()
	id, err := v.Verify(ctx, token)
	if err != nil {
		return acl.Decision{}, fmt.Errorf("the hub would not take this token: %s", strings.TrimSuffix(err.Error(), "."))
	}
	return id.Policy().Decide(acl.Action(cmd.Action), cmd.Topic, cmd.Group), nil
}

// token finds the token to check.
func (cmd *aclCheckCmd) token(in io.Reader) (string, error) {
	switch {
	case (cmd.Token != "") == (cmd.TokenFile != ""):
		return "", errors.New("which token? give --token or --token-file; --token - reads standard input")
	case cmd.TokenFile != "":
		f, err := os.Open(cmd.TokenFile)
		if err != nil {
			return "", fmt.Errorf("token file %s: %w", cmd.TokenFile, cause(err))
		}
		defer func() { _ = f.Close() }() // it was only read
		in = f
	case cmd.Token != "-":
		return cmd.Token, nil
	}
	// One byte too many is enough to see that there is too much.
	text, err := io.ReadAll(io.LimitReader(in, acl.MaxTokenBytes+1))
	if err != nil {
		return "", fmt.Errorf("reading the token: %w", cause(err))
	}
	return strings.TrimSpace(string(text)), nil
}
