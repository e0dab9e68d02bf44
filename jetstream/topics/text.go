package topics

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// AgeText formats a duration in the units of a topics file.
func AgeText(d time.Duration) string {
	const day = 24 * time.Hour
	if d <= 0 {
		return "none"
	}
	var text string
	if days := d / day; days > 0 {
		text, d = fmt.Sprintf("%dd", days), d%day
		if d == 0 {
			return text
		}
	}
	rest := d.String()
	if s, ok := strings.CutSuffix(rest, "m0s"); ok {
		rest = s + "m"
	}
	if s, ok := strings.CutSuffix(rest, "h0m"); ok {
		rest = s + "h"
	}
	return text + rest
}

// SizeText formats a number of bytes in the units of a topics file.
func SizeText(n int64) string {
	if n <= 0 {
		return "none"
	}
	for _, unit := range []struct {
		size int64
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n%unit.size == 0 {
			return fmt.Sprintf("%d%s", n/unit.size, unit.name)
		}
	}
	return strconv.FormatInt(n, 10)
}
