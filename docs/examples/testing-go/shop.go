// Package shop is a small program that publishes, to show how it is tested with a hub.
package shop

import (
	"context"
	"fmt"

	eventhub "eventhub/sdk/go"
)

// Shop sells things.
type Shop struct{ hub *eventhub.Client }

// New returns a shop that tells a hub of its orders.
func New(hub *eventhub.Client) *Shop { return &Shop{hub} }

// Place places an order.
func (s *Shop) Place(ctx context.Context, number int, customer string) error {
	order := map[string]int{"order": number}
	if _, err := s.hub.Publish(ctx, "orders.placed", order, eventhub.PublishOptions{Key: customer}); err != nil {
		return fmt.Errorf("place order %d: %w", number, err)
	}
	return nil
}
