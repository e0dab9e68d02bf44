package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"
)

// check implements serve --check. It prints the plan of the hub, or every configuration error.
func (cmd *serveCmd) check(ctx context.Context, std streams, set settings, faults []error) error {
	if at := os.Getenv("EVENTHUB_URL"); at != "" {
		if _, err := (hubFlags{URL: at, credentialFlags: credentialFlags{Token: "any"}}).token(); err != nil {
			faults = append(faults, err)
		}
	}
	if at := os.Getenv("EVENTHUB_OPS_URL"); at != "" {
		if _, err := checkURL(at, "http", "https"); err != nil {
			faults = append(faults, fmt.Errorf("address of the operations port: %w; use http://HOST:PORT or https://HOST:PORT (EVENTHUB_OPS_URL)", err))
		}
	}
	if len(faults) > 0 {
		for _, f := range faults {
			_, _ = fmt.Fprintln(std.err, "eventhub: "+strings.ReplaceAll(f.Error(), "\n", "; "))
		}
		return &exitError{1, nil}
	}
	printLines(std.out, "configuration is valid", cmd.plan(ctx, &set))
	return nil
}

// flagOf finds a flag name in an error of the parser.
var flagOf = regexp.MustCompile(`--([a-z][a-z-]*)`)

// parseRest parses again without the invalid flag values, because the parser stops at the first.
// err is the parser's first error. parseRest returns an error for each invalid value. Any other
// parse error is returned as the last result.
func parseRest(parser *kong.Kong, args []string, err error) (*kong.Context, []error, error) {
	var faults []error
	unset := make(map[string]string)
	defer func() {
		for name, value := range unset {
			_ = os.Setenv(name, value) // cannot fail: the variable was set before
		}
	}()
	for {
		found := flagOf.FindStringSubmatch(err.Error())
		if found == nil {
			return nil, nil, err
		}
		name, from := "--"+found[1], ""
		left := slices.DeleteFunc(slices.Clone(args), func(arg string) bool { return strings.HasPrefix(arg, name+"=") })
		if len(left) == len(args) {
			from = variableOf(parser, found[1])
			value, set := os.LookupEnv(from)
			if !set {
				return nil, nil, err
			}
			unset[from] = value
			_ = os.Unsetenv(from) // cannot fail: the variable is set
			if strings.Contains(err.Error(), from) {
				from = ""
			} else {
				from = " (" + from + ")"
			}
		}
		args = left
		faults = append(faults, fmt.Errorf("%w%s", err, from))
		var call *kong.Context
		if call, err = parser.Parse(args); err == nil {
			return call, faults, nil
		}
	}
}

// variableOf returns the environment variable of a flag of serve.
func variableOf(parser *kong.Kong, flag string) string {
	for _, command := range parser.Model.Children {
		for _, f := range command.Flags {
			if command.Name == "serve" && f.Name == flag && len(f.Envs) > 0 {
				return f.Envs[0]
			}
		}
	}
	return ""
}

// checkData checks whether the data directory is usable and safe, without creating it.
func (cmd *serveCmd) checkData(set *settings) error {
	if cmd.Ephemeral {
		return nil
	}
	if err := checkDataDir(cmd.Data); err != nil {
		return err
	}
	if !cmd.Check {
		return nil // the start of the hub uses the directory
	}
	if set.makesToken {
		if _, err := readToken(cmd.Data); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	info, err := os.Stat(cmd.Data)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return dataDirError(cmd.Data, err)
	case !info.IsDir():
		return dataDirError(cmd.Data, errors.New("not a directory"))
	}
	return nil
}

// plan describes what the hub would do.
func (cmd *serveCmd) plan(ctx context.Context, set *settings) [][2]string {
	at := func(host string, port uint16) string { return net.JoinHostPort(host, strconv.Itoa(int(port))) }
	access := "open"
	if cmd.metricsNeedToken() {
		access = "with a token"
	}
	lines := [][2]string{
		{"websocket", scheme("ws", set.cert) + at(cmd.Bind, cmd.WSPort)},
		{"http", scheme("http", set.cert) + at(cmd.Bind, cmd.HTTPPort)},
		{"ops", scheme("http", set.opsCert()) + at(cmd.OpsBind, cmd.OpsPort) + ", /metrics " + access},
	}
	if cmd.Demo {
		visitors := ", which asks for a token"
		if cmd.local() {
			visitors = ", with a token for the demo alone"
		}
		lines = append(lines, [2]string{"demo", scheme("http", set.cert) + at(cmd.Bind, cmd.WSPort) + demoPath + visitors})
	}
	if cmd.NATSListen != "" {
		at := "nats://" + cmd.NATSListen
		if cmd.natsOverTLS() {
			at = "tls://" + cmd.NATSListen
		} else if _, public := cmd.natsPublic(); public {
			at += ", tokens in clear text"
		}
		lines = append(lines, [2]string{"nats", at})
	}
	if set.cert != nil {
		lines = append(lines, [2]string{"tls", "for " + strings.Join(set.cert.names(), ", ") + ", until " + set.cert.expires().UTC().Format(time.RFC3339)})
	}
	origins := "none"
	switch allowed := cmd.origins(); {
	case allowed == nil:
		origins = "any"
	case len(allowed) > 0:
		origins = strings.Join(allowed, ", ")
	}
	if len(cmd.Proxies) > 0 {
		lines = append(lines, [2]string{"proxies", strings.Join(cmd.Proxies, ", ")})
	}
	lines = append(lines, [2]string{"origins", origins}, [2]string{"data", cmd.where()})
	if cmd.TopicsFile != "" {
		lines = append(lines, [2]string{"topics", fmt.Sprintf("%s, rules: %d", cmd.TopicsFile, len(set.topics))})
	}
	if set.outbox != nil {
		place := set.outbox.String()
		if err := set.outbox.look(ctx, cmd.outboxServeFlags.Table, cmd.outboxServeFlags.Migrate); err != nil {
			// The hub would start nevertheless, so this is not a configuration error.
			place = strings.Join(strings.Fields(err.Error()), " ") + " (the hub would start and retry)"
		}
		lines = append(lines, [2]string{"outbox", place})
	}
	if set.tracing != nil {
		address, _, _ := strings.Cut(set.tracing.url, "?") // what follows may be a secret
		lines = append(lines, [2]string{"tracing", "to " + address})
	}
	lines = append(lines, cmd.credentials(set)...)
	return append(lines, cmd.limitFlags.lines()...)
}

// credentials describes the tokens that the hub would accept, without revealing any part of them.
func (cmd *serveCmd) credentials(set *settings) (lines [][2]string) {
	if len(set.auth.Static) > 0 {
		own := "as configured"
		if file := filepath.Join(cmd.Data, tokenName); set.makesToken {
			own = "in " + file
			if _, err := os.Stat(file); err != nil {
				own += ", created at startup"
			}
		}
		rights := ", full access"
		if p := set.auth.Static[0].Policy; p != nil {
			rights = fmt.Sprintf(", with a policy of %d rules", p.Len())
		}
		lines = append(lines, [2]string{"token", own + rights})
	}
	var signed string
	switch {
	case set.auth.Secret != nil:
		signed = "signed with HS256"
	case set.auth.JWKSURL != "":
		signed = "signed by a key of the JWKS"
	default:
		return lines
	}
	if set.auth.Audience != "" {
		signed += ", for " + set.auth.Audience
	}
	if set.auth.Issuer != "" {
		signed += ", from " + set.auth.Issuer
	}
	return append(lines, [2]string{"jwt", signed})
}
