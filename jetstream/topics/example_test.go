package topics_test

import (
	"fmt"
	"time"

	"eventhub/jetstream/topics"
)

// Faults say which rule and which fields of it are wrong, and what to do.
func ExampleValidate() {
	for _, fault := range topics.Validate([]topics.Rule{
		{Pattern: "orders.**", MaxAge: 30 * 24 * time.Hour},
		{Pattern: "sensor.state", Compaction: true, MaxAge: time.Minute},
	}) {
		fmt.Printf("rule %d, %s: %v\n", fault.Rule, fault.Pattern, fault.Fields)
	}
	// Output:
	// rule 1, sensor.state: [retention.age compaction]
}
