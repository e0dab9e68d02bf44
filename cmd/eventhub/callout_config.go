package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"eventhub/acl"
	"eventhub/jetstream"
)

// authCalloutCmd is `eventhub auth-callout`.
type authCalloutCmd struct {
	Config  authCalloutConfigCmd  `cmd:"" help:"Make the keys of auth callouts, and print the configuration of the NATS servers and of the hubs."`
	Explain authCalloutExplainCmd `cmd:"" help:"Print the subjects that a token allows natively, and what of its policy NATS cannot express."`
}

// authCalloutConfigCmd is `eventhub auth-callout config`.
type authCalloutConfigCmd struct {
	Dir           string `required:"" placeholder:"DIR" help:"Directory for the files with the seeds of the keys. It is made if it does not exist."`
	HubAccount    string `default:"EVENTHUB" help:"NATS account of the hubs, which has the streams."`
	ClientAccount string `default:"EVENTHUB_CLIENTS" help:"NATS account of native clients."`
	SystemAccount string `default:"SYS" help:"System account, which disconnects clients whose tokens were revoked."`
	MaxSubs       int    `default:"1000" help:"Subscriptions of one native client."`
	Isolation     string `name:"nats-isolation" enum:"on,off" default:"on" help:"on gives native clients an account of their own; off places them in the account of the hubs."`
}

// The files of `eventhub auth-callout config`.
const (
	issuerFile = "issuer.nk"
	xkeyFile   = "xkey.nk"
	hubFile    = "hub.nk"
)

// Run makes the keys and prints the configuration.
func (cmd *authCalloutConfigCmd) Run(std streams) error {
	for _, name := range []string{cmd.HubAccount, cmd.ClientAccount, cmd.SystemAccount} {
		if name == "" || strings.ContainsFunc(name, func(r rune) bool {
			return (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '_' && r != '-'
		}) {
			return fmt.Errorf("account %q: use letters, digits, _ and -", name)
		}
	}
	if cmd.HubAccount == cmd.ClientAccount || cmd.HubAccount == cmd.SystemAccount || cmd.ClientAccount == cmd.SystemAccount {
		return errors.New("two of the accounts have the same name; choose different names, and --nats-isolation=off to place native clients in the account of the hubs")
	}
	if cmd.MaxSubs < 1 {
		return fmt.Errorf("subscriptions of a client: %d is below 1 (--max-subs)", cmd.MaxSubs)
	}
	if err := os.MkdirAll(cmd.Dir, 0o700); err != nil {
		return dataDirError(cmd.Dir, err)
	}
	public := make(map[string]string)
	for name, kind := range map[string]jetstream.KeyKind{issuerFile: jetstream.IssuerKey, xkeyFile: jetstream.EncryptionKey, hubFile: jetstream.UserKey} {
		key, err := jetstream.NewKey(kind)
		if err != nil {
			return err
		}
		if err := writeSeed(filepath.Join(cmd.Dir, name), key); err != nil {
			return err
		}
		public[name] = key.Public
	}
	if _, err := io.WriteString(std.out, cmd.text(public[issuerFile], public[xkeyFile], public[hubFile])); err != nil {
		return &outputError{err}
	}
	return nil
}

// text is the configuration, with the public keys.
func (cmd *authCalloutConfigCmd) text(issuer, xkey, hub string) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	isolated := cmd.Isolation == "on"
	line("# Each hub, with the files of %s (chmod 600):", cmd.Dir)
	for _, v := range [][2]string{
		{"NATS_NKEY_SEED", hubFile}, {"EVENTHUB_AUTH_CALLOUT", ""}, {"EVENTHUB_AUTH_CALLOUT_ISSUER", issuerFile}, {"EVENTHUB_AUTH_CALLOUT_XKEY", xkeyFile},
	} {
		value := "true"
		if v[1] != "" {
			value = filepath.Join(cmd.Dir, v[1])
		}
		line("#   %s=%s", v[0], value)
	}
	line("#   EVENTHUB_AUTH_CALLOUT_HUB_ACCOUNT=%s", cmd.HubAccount)
	line("#   EVENTHUB_AUTH_CALLOUT_CLIENT_ACCOUNT=%s", cmd.ClientAccount)
	line("#   EVENTHUB_NATS_ISOLATION=%s", cmd.Isolation)
	line("# Each NATS server:")
	line("accounts {")
	line("  %s {", cmd.HubAccount)
	line("    jetstream: enabled")
	line("    users: [ {nkey: %s} ]", hub)
	line("    imports: [ {service: {account: %s, subject: %q}} ]", cmd.SystemAccount, jetstream.KickSubject)
	if isolated {
		line("    exports: [")
		for _, s := range jetstream.NativeServices() {
			kind := ""
			if s.Stream {
				kind = ", response_type: stream"
			}
			line("      {service: %q, accounts: [%s]%s}", s.Subject, cmd.ClientAccount, kind)
		}
		line("    ]")
	}
	line("  }")
	if isolated {
		line("  %s {", cmd.ClientAccount)
		line("    limits: {max_subs: %d}", cmd.MaxSubs)
		line("    imports: [")
		for _, s := range jetstream.NativeServices() {
			line("      {service: {account: %s, subject: %q}}", cmd.HubAccount, s.Subject)
		}
		line("    ]")
		line("  }")
	}
	line("  %s {", cmd.SystemAccount)
	line("    exports: [ {service: %q, accounts: [%s]} ]", jetstream.KickSubject, cmd.HubAccount)
	line("  }")
	line("}")
	line("system_account: %s", cmd.SystemAccount)
	line("authorization {")
	line("  timeout: 5")
	line("  auth_callout {")
	line("    issuer: %s", issuer)
	line("    xkey: %s", xkey)
	line("    account: %s", cmd.HubAccount)
	line("    auth_users: [ %s ]", hub)
	if isolated { // the users of other accounts are not asked about
		line("    allowed_accounts: [ %s, %s ]", cmd.HubAccount, cmd.ClientAccount)
	} else {
		line("    allowed_accounts: [ %s ]", cmd.HubAccount)
	}
	line("  }")
	line("}")
	return b.String()
}

// authCalloutExplainCmd is `eventhub auth-callout explain`.
type authCalloutExplainCmd struct {
	storeFlags

	Hub authFlags `embed:"" group:"The hub's configuration"`

	HubToken     string `env:"WS_TOKEN" group:"The hub's configuration" help:"The hub's own token."`
	HubTokenFile string `env:"WS_TOKEN_FILE" group:"The hub's configuration" placeholder:"FILE" help:"File with the hub's own token."`

	Token     string `arg:"" optional:"" help:"Token to explain; - reads it from standard input. Other users of this host can see command lines."`
	TokenFile string `name:"client-token-file" placeholder:"FILE" help:"File with the token to explain."`
}

// Run prints the permissions.
func (cmd *authCalloutExplainCmd) Run(ctx context.Context, std streams) error {
	token, err := (&aclCheckCmd{Token: cmd.Token, TokenFile: cmd.TokenFile}).token(std.in)
	if err != nil {
		return err
	}
	own, err := tokenFlags{cmd.HubToken, cmd.HubTokenFile}.configured()
	if err != nil {
		return err
	}
	cfg, err := cmd.Hub.config(own)
	if err != nil {
		return err
	}
	rules, err := cmd.rules()
	if err != nil {
		return err
	}
	cfg.Snapshots = snapshotTopics(rules)
	cfg.Logger = slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
	v, err := acl.NewVerifier(ctx, cfg)
	if err != nil {
		return fmt.Errorf("%w (WS_TOKEN, JWT_SECRET, JWT_SECRET_FILE, JWT_JWKS_URL)", err)
	}
	defer v.Close()
	id, err := v.Verify(ctx, token)
	if err != nil {
		return fmt.Errorf("token not accepted: %s", strings.TrimSuffix(err.Error(), "."))
	}
	if id.Unlimited() {
		_, err := fmt.Fprintln(std.out, "the hub's own token: full access to the account of the hub")
		return err
	}
	return cmd.with(ctx, std, false, func(bus *jetstream.Bus) error {
		p, err := bus.Admin().NATS().Permissions(ctx, nativeRights(id), jetstream.NativeInbox(token), cmd.Isolation == "off")
		if err != nil {
			return err
		}
		return printPermissions(std.out, p)
	})
}

// printPermissions prints what a native client may do.
func printPermissions(w io.Writer, p *jetstream.NativePermissions) error {
	var b strings.Builder
	section := func(title string, lines []string) {
		b.WriteString(title + "\n")
		for _, l := range lines {
			b.WriteString("  " + l + "\n")
		}
	}
	section("inbox prefix", []string{strings.TrimSuffix(p.Subscribe[0], ".>")})
	section("may subscribe to", p.Subscribe)
	section("may publish to", slices.Sorted(slices.Values(p.Publish)))
	if len(p.Narrowed) > 0 {
		section("narrowed", p.Narrowed)
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return &outputError{err}
	}
	return nil
}
