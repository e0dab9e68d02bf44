package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"eventhub/jetstream"
)

// maxText is the largest value in bytes that is read from a text column other than the payload. The
// bus accepts at most 16 KiB of headers and attributes, which JSON escapes can enlarge six times.
const maxText = 128 << 10

// largeColumn is a column whose values may be too large to read. The table itself limits the id,
// topic, and key.
type largeColumn struct {
	name   string
	most   int  // in bytes
	needed bool // the record cannot be published without it
}

func (s *SQLStore) largeColumns(maxPayload int) []largeColumn {
	if maxPayload <= 0 {
		maxPayload = s.maxPayload
	}
	return []largeColumn{
		{"payload", maxPayload, true},
		{"headers", maxText, true},
		{"attributes", maxText, true},
		{"type", maxText, true},
		{"last_err", maxText, false},
		{"claimed_by", maxText, false},
	}
}

// columns returns the columns that records reads. A value that is too large reads as empty, and the
// last column then holds the error.
func (s *SQLStore) columns(maxPayload int) string {
	list := "id, seq, aggregatetype, aggregateid, type, payload, headers, attributes, ts, status, claimed_by, lease_until, attempts, last_err, next_at, publish_began, added_at, sent_at"
	names := strings.Split(list, ", ")
	var why strings.Builder
	for _, c := range s.largeColumns(maxPayload) {
		i := slices.Index(names, c.name)
		names[i] = fmt.Sprintf("CASE WHEN octet_length(%[1]s) <= %[2]d THEN %[1]s ELSE '' END", c.name, c.most)
		if !c.needed {
			continue
		}
		fmt.Fprintf(&why, " WHEN octet_length(%[1]s) > %[2]d THEN 'column %[1]s has ' || octet_length(%[1]s) || ' bytes, at most %[2]d are allowed'", c.name, c.most)
	}
	return strings.Join(names, ", ") + ", CASE" + why.String() + " ELSE '' END"
}

// records reads rows of columns, followed by the columns of more. A row that cannot be read or
// decoded is returned with as much as could be read.
func (s *SQLStore) records(ctx context.Context, query string, args []any, more ...any) ([]*Record, error) {
	rows, err := s.query(ctx, s.db, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var list []*Record
	for rows.Next() {
		r, err := scanRecord(rows, more)
		if err != nil {
			return nil, err
		}
		list = append(list, r)
	}
	return list, rows.Err()
}

func scanRecord(rows *sql.Rows, more []any) (*Record, error) {
	r := new(Record)
	var payload, headers, attributes string
	to := append([]any{
		&r.ID, &r.Sequence, &r.Topic, &r.Key, &r.Type, &payload, &headers, &attributes, &r.TS, &r.Status, &r.ClaimedBy,
		&r.LeaseUntil, &r.Attempts, &r.LastErr, &r.NextAt, &r.PublishBegan, &r.AddedAt, &r.SentAt, &r.TooLarge,
	}, more...)
	if err := rows.Scan(to...); err != nil {
		for i := range to[:len(to)-len(more)] {
			to[i] = loose{to[i]}
		}
		if rows.Scan(to...) != nil {
			return nil, err
		}
		r.undecodable = fmt.Errorf("read the row: %w", err)
	}
	if r.Payload = json.RawMessage(payload); payload == "" {
		r.Payload = json.RawMessage("null") // as in Add
	}
	if r.TooLarge != "" {
		r.undecodable = errors.New(r.TooLarge)
	}
	if r.undecodable == nil {
		r.undecodable = r.decode(headers, attributes)
	}
	return r, nil
}

// loose scans a column into a field and ignores a value of the wrong type. The tables that Migrate
// creates hold no such values, but a table created otherwise in SQLite might not be STRICT.
type loose struct{ field any }

// Scan implements sql.Scanner.
func (l loose) Scan(value any) error {
	switch v := value.(type) {
	case string:
		switch field := l.field.(type) {
		case *string:
			*field = v
		case *Status:
			*field = Status(v)
		}
	case int64:
		switch field := l.field.(type) {
		case *int64:
			*field = v
		case *int:
			*field = int(v)
		}
	}
	return nil
}

// decode parses columns that may have been written without Add, and rejects errors that the bus
// would not notice.
func (r *Record) decode(headers, attributes string) error {
	if r.ID == "" {
		return errors.New("column id is empty; every attempt would store another event")
	}
	if headers != "" {
		if err := json.Unmarshal([]byte(headers), &r.Headers); err != nil {
			return fmt.Errorf("column headers is not a JSON object of strings: %w", err)
		}
	}
	if err := r.setAttributes(attributes); err != nil {
		return fmt.Errorf("decode column attributes: %w", err)
	}
	if field := r.noUTF8(); field != "" {
		return fmt.Errorf("%s is not valid UTF-8", field)
	}
	if !jetstream.ValidPayload(r.Payload) {
		return errBadPayload
	}
	return nil
}
