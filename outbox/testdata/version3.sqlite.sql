BEGIN;

CREATE TABLE IF NOT EXISTS outbox_versions (version INTEGER PRIMARY KEY);

-- 1: the table; all indexes but that of the ids are partial, so that sent rows cost a claim nothing
CREATE TABLE "outbox" (
  seq           INTEGER PRIMARY KEY AUTOINCREMENT,
  id            TEXT NOT NULL UNIQUE DEFAULT (printf('%08x-%04x-7%03x-%04x-%012x', CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER) >> 16, CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER) & 65535, random() & 4095, 32768 | (random() & 16383), random() & 281474976710655)),
  aggregatetype TEXT NOT NULL CONSTRAINT topic_without_slash CHECK (aggregatetype <> '' AND aggregatetype NOT LIKE '%/%'),  -- topic
  aggregateid   TEXT NOT NULL DEFAULT '',  -- key, or '' for none
  type          TEXT NOT NULL DEFAULT '',  -- header "type" of the event, or ''
  payload       TEXT NOT NULL,             -- JSON
  headers       TEXT NOT NULL DEFAULT '',  -- JSON object of strings, or ''
  attributes    TEXT NOT NULL DEFAULT '',  -- JSON object with sid, tags, caused_by, tombstone, or ''
  ts            INTEGER NOT NULL DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),  -- of the event; all times are epoch milliseconds
  status        TEXT NOT NULL DEFAULT 'pending' CHECK (status = 'pending' OR status = 'claimed' OR status = 'sent' OR status = 'error'),
  claimed_by    TEXT NOT NULL DEFAULT '',
  lease_until   INTEGER NOT NULL DEFAULT 0,
  attempts      INTEGER NOT NULL DEFAULT 0,
  last_err      TEXT NOT NULL DEFAULT '',
  next_at       INTEGER NOT NULL DEFAULT 0,
  publish_began INTEGER NOT NULL DEFAULT 0,
  added_at      INTEGER NOT NULL DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
  sent_at       INTEGER NOT NULL DEFAULT 0,
  lane          TEXT NOT NULL GENERATED ALWAYS AS (CASE WHEN aggregateid = '' THEN '/' || aggregatetype || '/' || id ELSE aggregatetype || '/' || aggregateid END) STORED,
  CONSTRAINT names_of_at_most_64_KiB CHECK (max(length(CAST(id AS BLOB)), length(CAST(aggregatetype AS BLOB)), length(CAST(aggregateid AS BLOB))) <= 65536),
  CONSTRAINT text_of_at_most_64_MiB CHECK (length(CAST(payload AS BLOB)) + length(CAST(headers AS BLOB)) + length(CAST(attributes AS BLOB)) + length(CAST(type AS BLOB)) <= 67108864)
) STRICT;
CREATE INDEX outbox_lanes ON "outbox" (lane, seq, status, added_at) WHERE status <> 'sent';
CREATE INDEX outbox_claimed ON "outbox" (lease_until) WHERE status = 'claimed';
CREATE INDEX outbox_sent ON "outbox" (sent_at) WHERE status = 'sent';
INSERT INTO outbox_versions (version) VALUES (1);

-- 2: on PostgreSQL, drainers are woken when rows are committed
INSERT INTO outbox_versions (version) VALUES (2);

-- 3: rows have ids by default; on PostgreSQL, commits notify only while a drainer sleeps; on SQLite, what is too large is refused
INSERT INTO outbox_versions (version) VALUES (3);

COMMIT;
