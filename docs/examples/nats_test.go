package examples

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"

	"eventhub/jetstream/natstest"
)

// natsTool returns the path of the nats command, which .ci/setup installs.
func natsTool(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../.tools/nats")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if path, err = exec.LookPath("nats"); err != nil {
		t.Fatalf("there is no nats command: %v; install it with .ci/tools .tools nats", err)
	}
	return path
}

// changing are the parts of an output that differ from run to run.
var changing = []struct {
	part *regexp.Regexp
	as   string
}{
	{regexp.MustCompile(`\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]* \+0000 UTC \([^)]*\)`), "TIME"},
	{regexp.MustCompile(`\b\d\d:\d\d:\d\d\b`), "TIME"},
	{regexp.MustCompile(`\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`), "ID"},
	{regexp.MustCompile(`"ts":\d+`), `"ts":0`},
}

func unchanging(text string) string {
	for _, c := range changing {
		text = c.part.ReplaceAllString(text, c.as)
	}
	return text
}

// terminal runs the lines of a page, one after the other, as a newcomer would type them.
type terminal struct {
	t        *testing.T
	dir      string
	env      []string
	prepared string // the exports of lines before
}

// run runs one line, and returns what it prints, and whether it succeeded.
func (m *terminal) run(line string) (output string, ok bool) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", m.prepared+line)
	var out bytes.Buffer
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = m.dir, append(os.Environ(), m.env...), &out, &out
	ok = cmd.Run() == nil
	return out.String(), ok
}

// reads is what the lines begin with that change nothing: what they show may take a moment to be
// so.
var reads = regexp.MustCompile(`^nats (kv (get|ls)|stream get) `)

// block runs the lines of a block and compares what they print with the page.
func (m *terminal) block(lines []string, want string, compare bool) {
	m.t.Helper()
	want = strings.TrimSpace(unchanging(want))
	shown := ""
	for _, line := range lines {
		if strings.HasPrefix(line, "export ") {
			m.prepared += line + "\n"
			continue
		}
		var next string
		for deadline := time.Now().Add(patience); ; <-time.After(100 * time.Millisecond) {
			output, ok := m.run(line)
			next = shown + unchanging(output)
			if !compare && !ok {
				m.t.Errorf("%s\nfails with:\n%s", line, output)
			}
			if !compare || strings.HasPrefix(want, strings.TrimSpace(next)) || !reads.MatchString(line) || time.Now().After(deadline) {
				break
			}
		}
		shown = next
	}
	if got := strings.TrimSpace(shown); compare && got != want {
		m.t.Errorf("%s\nprints:\n%s\nand the page says:\n%s", strings.Join(lines, "\n"), got, want)
	}
}

// TestNATSPage runs every command of docs/nats.md in order, on a fresh hub, and compares what the
// commands print with the page.
func TestNATSPage(t *testing.T) {
	t.Parallel()
	dir, tools, address := t.TempDir(), t.TempDir(), natstest.FreeAddress(t)
	if err := os.Symlink(natsTool(t), filepath.Join(tools, "nats")); err != nil {
		t.Fatal(err)
	}
	port := func() string { return strconv.Itoa(natstest.FreePorts(t, 1)[0]) }
	env := []string{
		"PATH=" + bin + ":" + tools + ":" + os.Getenv("PATH"), "HOME=" + tools, "XDG_CONFIG_HOME=" + tools,
		"WS_PORT=" + port(), "HTTP_PORT=" + port(), "OPS_PORT=" + port(), "TZ=UTC", "NO_COLOR=1",
	}
	// The address of the page may be in use. A nats command has it by default.
	second := &terminal{t: t, dir: dir, env: append(env, "NATS_URL=nats://"+address)}
	blocks := codeBlocks(t, "../nats.md")
	ran := 0
	own := "" // the address of a server of the user's own
	for i, b := range blocks {
		if b.language != "sh" {
			continue
		}
		text := strings.ReplaceAll(strings.TrimSpace(b.text), "127.0.0.1:4222", address)
		ran++
		if strings.HasSuffix(text, "eventhub serve") {
			hub := start(t, dir, env, "bash", "-c", strings.Replace(text, "eventhub serve", "exec eventhub serve", 1))
			hub.line("token") // the last line
			continue
		}
		if strings.HasPrefix(text, "eventhub auth-callout config") {
			// A server of the user's own gets this configuration. The hub has the page's address.
			config, ok := second.run(text)
			if !ok {
				t.Fatalf("%s fails with:\n%s", text, config)
			}
			own = natstest.Run(t, func(o *natsserver.Options) {
				if err := o.ProcessConfigString(config); err != nil {
					t.Fatalf("%v in\n%s", err, config)
				}
			}).ClientURL()
			continue
		}
		text = strings.ReplaceAll(text, "--nats-url nats://"+address, "--nats-url "+own)
		shows := i+1 < len(blocks) && blocks[i+1].language == ""
		want := ""
		if shows {
			want = blocks[i+1].text
		}
		second.block(strings.Split(text, "\n"), want, shows)
	}
	if ran < 10 {
		t.Errorf("the page has %d blocks of commands", ran)
	}
}
