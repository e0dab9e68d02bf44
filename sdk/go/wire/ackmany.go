package wire

// AckMany settles up to 1,000 events of the subscription with one frame, and does not wait for the
// hub's answer. The order of ids does not matter. Ids whose lease has ended are ignored.
func (s *Subscription) AckMany(ids []string) error { return s.client.post(s.ackMany(ids)) }

// AckManyAsync is AckMany with an answer, which done receives. done must not block.
func (s *Subscription) AckManyAsync(ids []string, done func(error)) error {
	return s.ask(s.ackMany(ids), done)
}

func (s *Subscription) ackMany(ids []string) func([]byte) []byte {
	return func(b []byte) []byte {
		b = append(s.frame(b, "ACK"), `,"ids":[`...)
		for i, id := range ids {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendString(b, id)
		}
		return append(b, ']')
	}
}
