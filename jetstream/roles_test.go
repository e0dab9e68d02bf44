package jetstream

import (
	"reflect"
	"testing"
)

// maxMethods is how many methods a reader can hold in mind.
const maxMethods = 12

func TestTypesHaveFewMethods(t *testing.T) {
	t.Parallel()
	for _, of := range []reflect.Type{
		reflect.TypeFor[*Bus](), reflect.TypeFor[*Group](), reflect.TypeFor[*Bookmarks](), reflect.TypeFor[*Keys](), reflect.TypeFor[*History](), reflect.TypeFor[*Admin](), reflect.TypeFor[*NATS](), reflect.TypeFor[*Groups](),
		reflect.TypeFor[*Collections](), reflect.TypeFor[*Collection](), reflect.TypeFor[*Publisher](), reflect.TypeFor[*Subscription](),
		reflect.TypeFor[*Held](), reflect.TypeFor[*Delivery](), reflect.TypeFor[*Sending](), reflect.TypeFor[*Handles](), reflect.TypeFor[*Event](),
	} {
		t.Logf("%-14s %d", of.Elem().Name(), of.NumMethod())
		if n := of.NumMethod(); n > maxMethods {
			t.Errorf("%s has %d methods, more than %d: is it two types?", of.Elem().Name(), n, maxMethods)
		}
	}
}
