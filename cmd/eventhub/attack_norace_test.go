//go:build !race

package main

// slowdown is 1 without the race detector.
const slowdown = 1
