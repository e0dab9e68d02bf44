package client

// AckMany settles up to 1,000 events of the subscription with one frame, and does not wait for the
// hub's answer. The order of ids does not matter. Ids whose lease has ended are ignored.
func (s *Subscription) AckMany(ids []string) error {
	return s.client.post(func(b []byte) []byte {
		b = append(s.frame(b, "ACK"), `,"ids":[`...)
		for i, id := range ids {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendString(b, id)
		}
		return append(b, ']')
	})
}
