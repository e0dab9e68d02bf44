package jetstream

import (
	"context"
	"fmt"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
)

// In a cluster, the pulls of members that end or pause wait for 10 s more. Events that come to them
// are at once another member's of the same hub, or soon one's of another hub, and have attempt 1.
func TestPullsOfMembersThatLeftDelayNothing(t *testing.T) {
	t.Parallel()
	const left, events = 8, 20
	servers := natstest.StartCluster(t, 3)
	natstest.Look(t, natstest.URLs(servers)...).Replicating(3)
	a, b := open(t, Config{URL: servers[0].URL(), Replicas: 3}), open(t, Config{URL: servers[1].URL(), Replicas: 3})
	for _, leave := range []struct {
		how string
		f   func(*Subscription, context.Context) error
	}{{"stop", (*Subscription).Stop}, {"disconnect", (*Subscription).Disconnect}, {"pause", (*Subscription).Pause}} {
		for _, to := range []struct {
			where string
			bus   *Bus
		}{{"the same hub", a}, {"another hub", b}} {
			t.Run(leave.how+", then subscribe on "+to.where, func(t *testing.T) {
				t.Parallel()
				topic := fmt.Sprintf("%s-%p", leave.how, to.bus)
				publishAll(t, b, topic, "first")
				for range left {
					s := take(t, a, topic, "g", SubscribeOptions{}).sub
					if err := leave.f(s, t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				k := take(t, to.bus, topic, "g", SubscribeOptions{})
				laps := refuse(t, b, topic+"-control")
				began := time.Now()
				for i := range events {
					err := b.NewPublisher().PublishAsync(t.Context(), topic, fmt.Append(nil, i), PublishOptions{}, func(_ event.Receipt, err error) {
						if err != nil {
							t.Error(err)
						}
					})
					if err != nil {
						t.Fatal(err)
					}
				}
				most := 0
				for range events {
					d := k.next()
					most = max(most, d.delivered)
					if d.Attempt != 1 {
						t.Errorf("event %s came as attempt %d; the server delivered it %d times", d.Event.Payload, d.Attempt, d.delivered)
					}
				}
				took, control := time.Since(began), laps()
				t.Logf("%d events came within %v, after up to %d deliveries; meanwhile %d of an event that is refused", events, took, most, control)
				// Of nine inboxes, each event has one to find.
				if to.bus == a && most > 1 || most > 100 {
					t.Errorf("the server delivered an event %d times", most)
				}
				if took > time.Second && control > 4*most {
					t.Errorf("%d events took %v, in which a refused one came %d times", events, took, control)
				}
			})
		}
	}
}

// refuse has a member refuse an event as often as the event comes, each time after an event was
// stored, until the function that it returns is called, which returns how often the event came.
func refuse(t *testing.T, b *Bus, topic string) (stop func() int) {
	t.Helper()
	k := take(t, b, topic, "g", SubscribeOptions{MaxAttempts: NeverGiveUp})
	publishAll(t, b, topic, "refused")
	ended, laps := make(chan struct{}), make(chan int)
	go func() {
		defer close(laps) // also when the test fails
		for n := 1; ; n++ {
			d := k.next()
			select {
			case <-ended:
				laps <- n
				return
			default:
			}
			publishAll(t, b, topic+"-beside", "stored")
			if err := d.Nack("control", 0); err != nil {
				t.Error(err)
			}
		}
	}()
	return func() int {
		close(ended)
		return <-laps
	}
}
