package records

import (
	"context"
	"encoding/json"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/internal/conn"
)

// Question asks all hubs what they hold of a consumer. It is an entry of the bucket of
// generations, which all hubs watch.
type Question struct {
	Held  string `json:"held"` // stream and consumer
	Reply string `json:"reply"`
	// LetGo asks them to give their leases up as well, and to answer with what they have held.
	LetGo bool `json:"let_go,omitempty"`
}

// questionPrefix begins the keys of questions. No stream has capitals in its name.
const questionPrefix = "HELD."

// AskHubs asks all hubs a question and calls f with each answer, until f returns true or wait is
// over: nobody knows which hubs there are.
func (r *Records) AskHubs(ctx context.Context, q Question, wait time.Duration, f func(answer []byte) (enough bool)) error {
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	nc := r.Conn.Link().NC
	q.Reply = nats.NewInbox()
	// one from each hub; more do not fit and are not heard
	answers := make(chan *nats.Msg, maxAnswers)
	sub, err := nc.ChanSubscribe(q.Reply, answers)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only when the connection is closed
	if err := nc.FlushWithContext(ctx); err != nil {
		return err
	}
	value, err := json.Marshal(q)
	if err != nil {
		return err
	}
	key := questionPrefix + strings.TrimPrefix(q.Reply, nats.InboxPrefix)
	if _, err := r.put(ctx, key, value); err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanWait)
		defer cancel()
		// the sweeper removes what stays
		_ = r.Conn.Purge(ctx, groupsBucket, generationSubject(key), 0)
	}()
	began := time.Now()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for stalls := 0; ; {
		select {
		case m := <-answers:
			if f(m.Data) {
				return nil
			}
		case <-timer.C:
			// This process stood still: perhaps its own answer was not written yet.
			if late := time.Since(began) > wait+wait/4; late && stalls < 5 {
				stalls++
				began = time.Now()
				timer.Reset(wait)
				continue
			}
			if len(answers) > 0 {
				timer.Reset(0)
				continue
			}
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// maxAnswers bounds the answers that wait to be read.
const maxAnswers = 10_000

// hear hands a question of another hub on. An old question, which is not live, takes no leases.
func (r *Records) hear(value []byte, live bool) {
	var q Question
	if json.Unmarshal(value, &q) != nil || q.Reply == "" || q.LetGo && !live {
		return
	}
	r.Hooks.Held(&q)
}
