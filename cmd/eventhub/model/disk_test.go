//go:build unix && !linux

package model

import "testing"

// disk is a file system that can be filled, which only Linux has.
type disk struct{ dir string }

func newDisk(testing.TB) *disk { return nil }

func (*disk) fill()    {}
func (*disk) enlarge() {}
