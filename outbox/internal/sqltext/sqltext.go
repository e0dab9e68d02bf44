// Package sqltext has the SQL that tables of this project share, for SQLite and PostgreSQL.
package sqltext

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// The time of the database in epoch milliseconds. It stays the same within a statement.
const (
	SQLiteNow     = "CAST(unixepoch('subsec') * 1000 AS INTEGER)"
	PostgreSQLNow = "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000 AS BIGINT)"
)

// Number replaces each question mark of a query by $1, $2 and so on, as PostgreSQL has parameters.
func Number(query string) string {
	var b strings.Builder
	n := 0
	for part := range strings.SplitSeq(query, "?") {
		if n > 0 {
			b.WriteString("$" + strconv.Itoa(n))
		}
		b.WriteString(part)
		n++
	}
	return b.String()
}

var tableName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,39}$`)

// ValidTable says what is wrong with the name of a table.
func ValidTable(name string, sqlite bool) error {
	if !tableName.MatchString(name) {
		return fmt.Errorf("table %q: must be 1 to 40 lower-case letters, digits, and _, and must not begin with a digit", name)
	}
	if sqlite && strings.HasPrefix(name, "sqlite_") {
		return fmt.Errorf("table %q: SQLite reserves names that begin with sqlite_", name)
	}
	return nil
}
