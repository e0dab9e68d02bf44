package conn

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// A question about a stream or a consumer is asked again after AskFirst without an answer, then
// after twice as long each time, up to askMax.
const (
	AskFirst = 500 * time.Millisecond
	askMax   = time.Second
)

// OpenWait is how long a question of Open waits for an answer. A cluster elects a leader in 4 to
// 9 s, and now and then in a second round.
const OpenWait = 30 * time.Second

// Again is AskAgain for PublishWait.
func Again[T any](ctx context.Context, ask func(context.Context) (T, error)) (T, error) {
	return AskAgain(ctx, PublishWait, ask)
}

// AskAgain asks NATS something that may be asked twice, and asks again while no answer comes, until
// ctx ends, or limit has passed. The first answer to any of the questions counts.
//
// JetStream does not answer a question about a stream or a consumer that has no leader in that
// moment, not even once there is a leader: a client that asked once would wait in vain. To make a
// stream or a consumer that is there already with the same settings is no error.
//
// The caller asks first, itself: handing the question to a goroutine and the answer back costs more
// than a read of one key may, where wake-ups are slow.
func AskAgain[T any](ctx context.Context, limit time.Duration, ask func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var (
		mu       sync.Mutex
		answered bool
		value    T
		err      error
	)
	question := func() {
		v, failed := ask(ctx)
		mu.Lock()
		defer mu.Unlock()
		if !answered && ctx.Err() == nil {
			answered, value, err = true, v, failed
			cancel()
		}
	}
	repeated := make(chan struct{})
	repeat := time.AfterFunc(AskFirst, func() {
		defer close(repeated)
		repeatUntil(ctx, question)
	})
	question()
	if !repeat.Stop() {
		<-repeated
	}
	if !answered {
		return value, ctx.Err()
	}
	return value, err
}

// repeatUntil asks, then asks again at growing intervals until ctx ends. It waits for all answers.
func repeatUntil(ctx context.Context, question func()) {
	var asking sync.WaitGroup
	defer asking.Wait()
	for wait := AskFirst; ctx.Err() == nil; {
		asking.Go(question)
		wait = min(2*wait, askMax)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// UntilHeard writes to a bucket, and writes again for up to PublishWait while nobody listens: the
// bucket has no leader in that moment, and nothing was written.
func UntilHeard[T any](ctx context.Context, write func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, PublishWait)
	defer cancel()
	for {
		value, err := write(ctx) // waits itself, and tries twice more
		if !errors.Is(err, natsjs.ErrNoStreamResponse) || ctx.Err() != nil {
			return value, err
		}
	}
}

// Write stores a message in one of the hub's own streams, and sends it again for up to PublishWait
// while nobody listens: the stream was just made, or has no leader in that moment, and nothing was
// stored.
func (p *Pool) Write(ctx context.Context, stream string, msg *nats.Msg) (pubAck, error) {
	ctx, cancel := context.WithTimeout(ctx, PublishWait)
	defer cancel()
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		reply, err := p.Link().RequestMsg(ctx, msg)
		if err != nil {
			return pubAck{}, err
		}
		if !NoResponders(reply) {
			return ParsePubAck(reply.Data, stream)
		}
		if p.Pause(ctx, wait) != nil {
			return pubAck{}, nats.ErrNoResponders
		}
	}
}

// WhenUp asks NATS something, and asks again, for up to Config.OpenWait, while an error passes by
// itself. A cluster that starts together with the hub has no leader for a while, and a leader that
// was just elected knows of too few servers.
func WhenUp[T any](ctx context.Context, p *Pool, ask func() (T, error)) (T, error) {
	waiting, cancel := context.WithTimeout(ctx, p.cfg.OpenWait)
	defer cancel()
	for {
		value, err := ask()
		if err == nil || !Passing(err) {
			return value, err
		}
		p.cfg.Warn(ctx, "the nats cluster is not complete yet; retrying", "", slog.Duration("for", p.cfg.OpenWait), slog.Any("error", err))
		if p.Pause(waiting, AskFirst) != nil {
			return value, err
		}
	}
}

// placeWait is how long a refusal for want of servers may last after an election: a server that
// becomes the leader asks the others for their state.
const placeWait = 2 * time.Second

// whenPlaced makes a stream or a consumer by AskAgain, and begins again while there is no place.
func whenPlaced[T any](ctx context.Context, limit time.Duration, create func(context.Context) (T, error)) (T, error) {
	return Placed(ctx, func() (T, error) { return AskAgain(ctx, limit, create) })
}

// Placed asks for copies, and asks again for up to placeWait while the cluster knows of too few
// servers for them.
func Placed[T any](ctx context.Context, ask func() (T, error)) (T, error) {
	waiting, cancel := context.WithTimeout(ctx, placeWait)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		value, err := ask()
		if refused, ok := errors.AsType[*natsjs.APIError](err); !ok || refused.ErrorCode != errNoPeers {
			return value, err
		}
		select {
		case <-tick.C:
		case <-waiting.Done():
			return value, err
		}
	}
}

// manager asks each question of JetStream's that may be asked twice by AskAgain, for wait at most.
// The deletions and UpdateStream are not among them: one that is late would undo what somebody did
// after the first. CreatePushConsumer is not either: its answer counts what is still to come.
//
// changed is called after each attempt to change a stream, or one of its consumers.
type manager struct {
	natsjs.JetStream
	wait    time.Duration
	changed func(stream, consumer string)
}

// Within is m with another wait.
func (m manager) Within(wait time.Duration) manager {
	m.wait = wait
	return m
}

func (m manager) AccountInfo(ctx context.Context) (*natsjs.AccountInfo, error) {
	return AskAgain(ctx, m.wait, m.JetStream.AccountInfo)
}

func (m manager) Stream(ctx context.Context, name string) (natsjs.Stream, error) {
	return AskAgain(ctx, m.wait, func(ctx context.Context) (natsjs.Stream, error) { return m.JetStream.Stream(ctx, name) })
}

func (m manager) CreateStream(ctx context.Context, cfg natsjs.StreamConfig) (natsjs.Stream, error) {
	defer m.changed(cfg.Name, "")
	return whenPlaced(ctx, m.wait, func(ctx context.Context) (natsjs.Stream, error) { return m.JetStream.CreateStream(ctx, cfg) })
}

func (m manager) UpdateStream(ctx context.Context, cfg natsjs.StreamConfig) (natsjs.Stream, error) {
	defer m.changed(cfg.Name, "")
	return m.JetStream.UpdateStream(ctx, cfg)
}

func (m manager) DeleteStream(ctx context.Context, name string) error {
	defer m.changed(name, "")
	return m.JetStream.DeleteStream(ctx, name)
}

func (m manager) KeyValue(ctx context.Context, bucket string) (natsjs.KeyValue, error) {
	return AskAgain(ctx, m.wait, func(ctx context.Context) (natsjs.KeyValue, error) { return m.JetStream.KeyValue(ctx, bucket) })
}

func (m manager) CreateKeyValue(ctx context.Context, cfg natsjs.KeyValueConfig) (natsjs.KeyValue, error) {
	defer m.changed("KV_"+cfg.Bucket, "")
	return whenPlaced(ctx, m.wait, func(ctx context.Context) (natsjs.KeyValue, error) { return m.JetStream.CreateKeyValue(ctx, cfg) })
}

func (m manager) Consumer(ctx context.Context, stream, name string) (natsjs.Consumer, error) {
	return AskAgain(ctx, m.wait, func(ctx context.Context) (natsjs.Consumer, error) { return m.JetStream.Consumer(ctx, stream, name) })
}

func (m manager) CreateConsumer(ctx context.Context, stream string, cfg natsjs.ConsumerConfig) (natsjs.Consumer, error) {
	defer m.changed(stream, cfg.Name)
	return whenPlaced(ctx, m.wait, func(ctx context.Context) (natsjs.Consumer, error) {
		return m.JetStream.CreateConsumer(ctx, stream, cfg)
	})
}

func (m manager) UpdateConsumer(ctx context.Context, stream string, cfg natsjs.ConsumerConfig) (natsjs.Consumer, error) {
	defer m.changed(stream, cfg.Name)
	return AskAgain(ctx, m.wait, func(ctx context.Context) (natsjs.Consumer, error) {
		return m.JetStream.UpdateConsumer(ctx, stream, cfg)
	})
}

func (m manager) CreateOrUpdateConsumer(ctx context.Context, stream string, cfg natsjs.ConsumerConfig) (natsjs.Consumer, error) {
	defer m.changed(stream, cfg.Name)
	return whenPlaced(ctx, m.wait, func(ctx context.Context) (natsjs.Consumer, error) {
		return m.JetStream.CreateOrUpdateConsumer(ctx, stream, cfg)
	})
}

func (m manager) PushConsumer(ctx context.Context, stream, name string) (natsjs.PushConsumer, error) {
	return AskAgain(ctx, m.wait, func(ctx context.Context) (natsjs.PushConsumer, error) {
		return m.JetStream.PushConsumer(ctx, stream, name)
	})
}

func (m manager) PauseConsumer(ctx context.Context, stream, name string, until time.Time) (*natsjs.ConsumerPauseResponse, error) {
	return AskAgain(ctx, m.wait, func(ctx context.Context) (*natsjs.ConsumerPauseResponse, error) {
		return m.JetStream.PauseConsumer(ctx, stream, name, until)
	})
}

func (m manager) DeleteConsumer(ctx context.Context, stream, name string) error {
	defer m.changed(stream, name)
	return m.JetStream.DeleteConsumer(ctx, stream, name)
}
