package facade

import (
	"strconv"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

// appendOK appends an OK frame. corr is echoed as it is, nil for none. An empty id is omitted.
func appendOK(dst, corr []byte, id string) []byte {
	dst = append(dst, `{"op":"OK"`...)
	dst = appendCorr(dst, corr)
	if id != "" {
		dst = append(dst, `,"id":`...)
		dst = jsonscan.AppendString(dst, id)
	}
	return append(dst, '}')
}

// appendOKAt appends the OK frame of a broadcast. A reason says why the broadcast could not begin
// where the client asked.
func appendOKAt(dst, corr []byte, pos, reason string) []byte {
	dst = append(dst, `{"op":"OK"`...)
	dst = appendCorr(dst, corr)
	dst = append(dst, `,"pos":`...)
	dst = jsonscan.AppendString(dst, pos)
	dst = append(dst, `,"recovered":`...)
	dst = strconv.AppendBool(dst, reason == "")
	if reason != "" {
		dst = append(dst, `,"reason":`...)
		dst = jsonscan.AppendString(dst, reason)
	}
	return append(dst, '}')
}

// appendErr appends an ERR frame. corr is echoed as it is, nil for none. final adds that the same
// request fails again, where the code alone would mean that it may succeed later.
func appendErr(dst, corr []byte, c code, msg string, final bool) []byte {
	dst = append(dst, `{"op":"ERR","code":`...)
	dst = jsonscan.AppendString(dst, string(c))
	dst = append(dst, `,"msg":`...)
	dst = jsonscan.AppendString(dst, msg)
	if final {
		dst = append(dst, `,"retryable":false`...)
	}
	dst = appendCorr(dst, corr)
	return append(dst, '}')
}

func appendCorr(dst, corr []byte) []byte {
	if corr == nil {
		return dst
	}
	dst = append(dst, `,"corr":`...)
	return append(dst, corr...)
}

// appendAssign appends an ASSIGN frame. Its topic is the one that the slots are of, which may be a
// further topic of the subscription. groupJSON is the group as a JSON string.
func appendAssign(dst []byte, groupJSON []byte, a *jetstream.Assignment) []byte {
	dst = jsonscan.AppendString(append(dst, `{"op":"ASSIGN","topic":`...), a.Topic)
	dst = append(append(dst, `,"group":`...), groupJSON...)
	dst = append(dst, `,"slots":[`...)
	for i, slot := range a.Slots {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(slot), 10)
	}
	dst = strconv.AppendUint(append(dst, `],"epoch":`...), a.Epoch, 10)
	return append(dst, '}')
}

// appendEvent appends an EVENT frame. topicJSON and groupJSON are the subscription's names as JSON
// strings. deadlineMS is the remaining time of the lease in milliseconds.
func appendEvent(dst []byte, topicJSON, groupJSON []byte, e *jetstream.Event, attempt int, deadlineMS int64) []byte {
	dst = append(dst, `{"op":"EVENT","topic":`...)
	dst = append(dst, topicJSON...)
	dst = append(dst, `,"group":`...)
	dst = append(dst, groupJSON...)
	dst = append(dst, ',')
	dst = appendDelivery(dst, e, attempt, deadlineMS)
	return append(dst, '}')
}

// appendDelivery appends the members event and ctx of an EVENT frame.
func appendDelivery(dst []byte, e *jetstream.Event, attempt int, deadlineMS int64) []byte {
	dst = append(dst, `"event":`...)
	dst = e.AppendRecord(dst)
	dst = append(dst, `,"ctx":{"attempt":`...)
	dst = strconv.AppendInt(dst, int64(attempt), 10)
	dst = append(dst, `,"ack_deadline_ms":`...)
	dst = strconv.AppendInt(dst, deadlineMS, 10)
	return append(dst, '}')
}
