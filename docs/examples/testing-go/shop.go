// Package shop is a small program that publishes, to show how it is tested with a hub.
package shop

import (
	"context"
	"encoding/json"
	"fmt"

	"eventhub/facade/client"
)

// Shop sells things.
type Shop struct{ hub *client.Client }

// New returns a shop that tells a hub of its orders.
func New(hub *client.Client) *Shop { return &Shop{hub} }

// Place places an order.
func (s *Shop) Place(ctx context.Context, number int, customer string) error {
	payload, err := json.Marshal(map[string]int{"order": number})
	if err != nil {
		return err
	}
	if _, err := s.hub.Publish(ctx, "orders.placed", payload, client.PublishOptions{Key: customer}); err != nil {
		return fmt.Errorf("place order %d: %w", number, err)
	}
	return nil
}
