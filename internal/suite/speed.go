package main

import (
	"encoding/json"
	"slices"
	"time"
)

// usualMicros is what validating the document takes, in microseconds, on the machine that the
// bounds were chosen on (BENCHMARKS.md, "json.Valid").
const usualMicros = 1.0

var document = []byte(`{"id":"o-1042","customer":{"name":"Ada Lovelace","mail":"ada@example.org"},` +
	`"lines":[{"sku":"A-1","count":2,"price":19.99},{"sku":"B-7","count":1,"price":5.5},` +
	`{"sku":"C-3","count":12,"price":0.25}],"currency":"EUR","paid":true,"placed":"2026-05-01T10:00:00Z"}`)

// slowdown returns how many times slower this machine computes at the moment than the usual one, at
// least 1. It takes about a fifth of a second.
func slowdown() float64 {
	const rounds, each = 21, 5000
	took := make([]float64, rounds)
	for i := range took {
		begun := time.Now()
		for range each {
			json.Valid(document)
		}
		took[i] = float64(time.Since(begun).Microseconds()) / each
	}
	slices.Sort(took)
	return max(1, took[rounds/2]/usualMicros)
}

// usualSeconds returns what a test would have taken on the usual machine. Only computing takes
// longer on a slower one; waiting does not. CPU time of several cores at once counts in full, so
// that the result is not below what a test without any wait would have taken.
func usualSeconds(wall, cpu, slowdown float64) float64 {
	return max(wall/slowdown, wall-cpu*(1-1/slowdown))
}
