//go:build linux

package lossyfs

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"
)

// object is a file or a directory, as processes see it, and as it is stored. The mutex of its
// System protects it.
type object struct {
	number uint64
	mode   uint32
	time   time.Time // of the last change
	tx     uint64    // the transaction of its last change

	data  []byte             // of a file
	names map[string]*object // of a directory

	storedData  []byte
	storedNames map[string]*object
	dirty       map[int]bool // pages of data that are not stored
}

func (s *System) newObject(mode uint32) *object {
	s.objects++
	return &object{
		number: s.objects, mode: mode, time: time.Now(), tx: s.tx,
		names: map[string]*object{}, storedNames: map[string]*object{}, dirty: map[int]bool{},
	}
}

// write writes data at an offset, beyond the end as well.
func (o *object) write(data []byte, offset int) {
	end := offset + len(data)
	o.grow(end)
	copy(o.data[offset:end], data)
	for p := offset / page; p*page < end; p++ {
		o.dirty[p] = true
	}
	o.time = time.Now()
}

// grow makes data at least so long.
func (o *object) grow(size int) {
	if size <= len(o.data) {
		return
	}
	for p := len(o.data) / page; p*page < size; p++ {
		o.dirty[p] = true
	}
	o.data = slices.Grow(o.data, size-len(o.data))
	clear(o.data[len(o.data):size])
	o.data = o.data[:size]
}

// store stores the data up to a size, by copying what is not stored yet.
func (o *object) store(size int) {
	if size > len(o.storedData) {
		o.storedData = slices.Grow(o.storedData, size-len(o.storedData))[:size]
	}
	for p := range o.dirty {
		if from := p * page; from < size {
			copy(o.storedData[from:min(from+page, size)], o.data[from:])
		}
		if (p+1)*page <= size || size == len(o.data) {
			delete(o.dirty, p)
		}
	}
}

// truncate makes data exactly so long. The journal has the change for what is stored.
func (o *object) truncate(size int) (stored func()) {
	o.grow(size)
	o.data = o.data[:size:size]
	maps.DeleteFunc(o.dirty, func(p int, _ bool) bool { return p*page >= size })
	o.time = time.Now()
	return func() {
		if len(o.storedData) > size {
			o.storedData = slices.Clip(o.storedData[:size])
		}
	}
}

// link gives an object a name, or takes the name away from what has it if the object is nil. The
// journal has the change for what is stored.
func (o *object) link(name string, to *object) (stored func()) {
	set := func(names map[string]*object) {
		if to == nil {
			delete(names, name)
		} else {
			names[name] = to
		}
	}
	set(o.names)
	o.time = time.Now()
	return func() { set(o.storedNames) }
}

// revert makes an object, and all below, what is stored of it. With a source of random numbers,
// pages that are not stored may have been written all the same. It returns how many bytes are lost.
func (o *object) revert(random *rand.Rand, done map[*object]bool) (lost int64) {
	if done[o] {
		return 0
	}
	done[o] = true
	if random != nil {
		o.writeBack(random)
	}
	lost = int64(len(o.dirty)) * page
	o.data, o.names = slices.Clone(o.storedData), maps.Clone(o.storedNames)
	clear(o.dirty)
	for _, name := range slices.Sorted(maps.Keys(o.names)) {
		lost += o.names[name].revert(random, done)
	}
	return lost
}

// writeBack stores some of the pages that are not stored: of a third of the files none, of a third
// all, and of the others each with the same chance.
func (o *object) writeBack(random *rand.Rand) {
	most := random.IntN(3)
	for _, p := range slices.Sorted(maps.Keys(o.dirty)) {
		if most == 0 || most == 1 && random.IntN(2) == 0 {
			continue
		}
		from, to := p*page, min((p+1)*page, len(o.data))
		if from >= to {
			continue
		}
		if to > len(o.storedData) {
			o.storedData = append(o.storedData, make([]byte, to-len(o.storedData))...)
		}
		copy(o.storedData[from:to], o.data[from:to])
		delete(o.dirty, p)
	}
}

// unsynced returns the paths below a directory of files of a name that are not stored. reached is
// whether the directory itself is.
func (o *object) unsynced(path, name string, reached bool) (found []string) {
	for n, child := range o.names {
		stored := reached && o.storedNames[n] == child
		switch {
		case n == name && (!stored || len(child.dirty) > 0):
			found = append(found, path+"/"+n)
		default:
			found = append(found, child.unsynced(path+"/"+n, name, stored)...)
		}
	}
	return found
}
