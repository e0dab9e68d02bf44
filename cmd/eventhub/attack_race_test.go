//go:build race

package main

// slowdown is by how much more time and memory the race detector takes, roughly.
const slowdown = 6
