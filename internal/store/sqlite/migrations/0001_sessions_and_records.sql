-- Sessions, records, and API keys.
--
-- Times are microseconds since 1970 in UTC; 0 is no time. In session, spec and
-- body hold the session; the other columns repeat what queries need.

-- A record is a chain of events: of a session, of its addenda, or a segment of
-- a node's system record.
CREATE TABLE record (
    n  INTEGER PRIMARY KEY,
    id TEXT    NOT NULL UNIQUE -- audit.RecordID
) STRICT;

CREATE TABLE event (
    n         INTEGER PRIMARY KEY,
    record    INTEGER NOT NULL REFERENCES record (n),
    seq       INTEGER NOT NULL,
    action    TEXT    NOT NULL,
    ref       TEXT    NOT NULL,
    concludes INTEGER NOT NULL, -- seq of the intent whose outcome this is; 0: none
    raw       TEXT    NOT NULL, -- the skeleton's exact bytes, which hash is of
    hash      BLOB    NOT NULL,
    salt      BLOB,             -- NULL together with payload: erased
    payload   TEXT,
    UNIQUE (record, seq)
) STRICT;

CREATE TABLE session (
    n          INTEGER PRIMARY KEY AUTOINCREMENT, -- order of creation; never shown
    id         TEXT    NOT NULL UNIQUE,
    record     INTEGER NOT NULL UNIQUE REFERENCES record (n),
    version    INTEGER NOT NULL,
    state      TEXT    NOT NULL,
    owner      TEXT    NOT NULL,
    node       TEXT    NOT NULL, -- that has the session
    generation INTEGER NOT NULL, -- of the current or last sandbox; 0: none yet
    created_at INTEGER NOT NULL,
    ended_at   INTEGER NOT NULL,
    spec       TEXT    NOT NULL, -- JSON, written once
    body       TEXT    NOT NULL  -- JSON of the rest
) STRICT;
CREATE INDEX session_live ON session (node, n) WHERE state <> 'ended';
CREATE INDEX session_by_owner ON session (owner, n);

-- One incarnation of a session.
CREATE TABLE sandbox (
    session    INTEGER NOT NULL REFERENCES session (n),
    generation INTEGER NOT NULL,
    node       TEXT    NOT NULL,
    boot       TEXT    NOT NULL, -- boot id of the node when it was started
    started_at INTEGER NOT NULL, -- when the store first heard of it
    ended_at   INTEGER NOT NULL, -- when the next one began or the session ended
    PRIMARY KEY (session, generation)
) STRICT, WITHOUT ROWID;

CREATE TABLE label (
    key     TEXT    NOT NULL,
    value   TEXT    NOT NULL,
    session INTEGER NOT NULL REFERENCES session (n),
    PRIMARY KEY (key, value, session)
) STRICT, WITHOUT ROWID;

-- The seal of a session's record or of a segment. No event follows it.
CREATE TABLE seal (
    record   INTEGER PRIMARY KEY REFERENCES record (n),
    envelope TEXT NOT NULL
) STRICT;

-- The addenda of a session that has ended, and their signed heads.
CREATE TABLE addenda (
    session INTEGER PRIMARY KEY REFERENCES session (n),
    record  INTEGER NOT NULL UNIQUE REFERENCES record (n)
) STRICT;

CREATE TABLE addenda_seal (
    record   INTEGER NOT NULL REFERENCES addenda (record),
    seq      INTEGER NOT NULL, -- of the addendum that it reaches to
    envelope TEXT    NOT NULL,
    PRIMARY KEY (record, seq)
) STRICT, WITHOUT ROWID;

-- The segments of the system record of each node.
CREATE TABLE segment (
    node      TEXT    NOT NULL,
    number    INTEGER NOT NULL, -- from 1
    record    INTEGER NOT NULL UNIQUE REFERENCES record (n),
    events    INTEGER NOT NULL,
    bytes     INTEGER NOT NULL, -- of skeletons and payloads
    opened_at INTEGER NOT NULL,
    sealed_at INTEGER NOT NULL,
    PRIMARY KEY (node, number)
) STRICT, WITHOUT ROWID;

-- The Merkle tree over the seals of a node: its leaves in order, and the roots
-- of its complete subtrees (audit.Tree), so that a seal adds a leaf in
-- O(log n).
CREATE TABLE leaf (
    node     TEXT    NOT NULL,
    position INTEGER NOT NULL, -- from 0
    record   INTEGER NOT NULL REFERENCES record (n),
    seq      INTEGER NOT NULL, -- of the last event that the seal covers
    PRIMARY KEY (node, position),
    UNIQUE (record, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE tree (
    node     TEXT PRIMARY KEY,
    subtrees BLOB NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE idempotency (
    scope      TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    digest     TEXT    NOT NULL,
    session    INTEGER NOT NULL REFERENCES session (n),
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (scope, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX idempotency_by_expiry ON idempotency (expires_at);

CREATE TABLE api_key (
    id            TEXT    PRIMARY KEY,
    hash          BLOB    NOT NULL UNIQUE,
    role          TEXT    NOT NULL,
    label         TEXT    NOT NULL,
    created_at    INTEGER NOT NULL,
    created_by    TEXT    NOT NULL,
    revoked_at    INTEGER NOT NULL, -- 0 while the key is valid
    first_used_at INTEGER NOT NULL -- 0 until the first use of the key is in the record of the node
) STRICT, WITHOUT ROWID;

-- The database refuses what the code must never do.

CREATE TRIGGER record_is_never_deleted BEFORE DELETE ON record
BEGIN SELECT RAISE(ABORT, 'a record is never deleted'); END;

CREATE TRIGGER record_is_never_renamed BEFORE UPDATE ON record
BEGIN SELECT RAISE(ABORT, 'a record is never renamed'); END;

CREATE TRIGGER event_is_never_deleted BEFORE DELETE ON event
BEGIN SELECT RAISE(ABORT, 'an event is never deleted'); END;

CREATE TRIGGER event_changes_only_by_erasure BEFORE UPDATE ON event
WHEN NEW.n <> OLD.n OR NEW.record <> OLD.record OR NEW.seq <> OLD.seq OR NEW.action <> OLD.action
  OR NEW.ref <> OLD.ref OR NEW.concludes <> OLD.concludes OR NEW.raw <> OLD.raw OR NEW.hash <> OLD.hash
  OR NEW.salt IS NOT NULL OR NEW.payload IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'an event changes only by erasure of its payload'); END;

CREATE TRIGGER seal_is_last BEFORE INSERT ON event
WHEN EXISTS (SELECT 1 FROM seal WHERE record = NEW.record)
BEGIN SELECT RAISE(ABORT, 'the record is sealed'); END;

CREATE TRIGGER seal_is_final BEFORE UPDATE ON seal
BEGIN SELECT RAISE(ABORT, 'a seal is never changed'); END;

CREATE TRIGGER seal_stays BEFORE DELETE ON seal
BEGIN SELECT RAISE(ABORT, 'a seal is never deleted'); END;

CREATE TRIGGER addenda_follow_the_seal BEFORE INSERT ON addenda
WHEN NOT EXISTS (SELECT 1 FROM session s JOIN seal ON seal.record = s.record WHERE s.n = NEW.session)
BEGIN SELECT RAISE(ABORT, 'addenda follow the seal of the session'); END;

CREATE TRIGGER addenda_stay BEFORE DELETE ON addenda
BEGIN SELECT RAISE(ABORT, 'addenda are never deleted'); END;

CREATE TRIGGER addenda_are_final BEFORE UPDATE ON addenda
BEGIN SELECT RAISE(ABORT, 'addenda never change their session'); END;

CREATE TRIGGER addenda_seal_is_final BEFORE UPDATE ON addenda_seal
BEGIN SELECT RAISE(ABORT, 'a seal is never changed'); END;

CREATE TRIGGER addenda_seal_stays BEFORE DELETE ON addenda_seal
BEGIN SELECT RAISE(ABORT, 'a seal is never deleted'); END;

CREATE TRIGGER segment_stays BEFORE DELETE ON segment
BEGIN SELECT RAISE(ABORT, 'a segment is never deleted'); END;

CREATE TRIGGER segment_follows_a_sealed_one BEFORE INSERT ON segment
WHEN NEW.number <> 1 AND NOT EXISTS (
    SELECT 1 FROM segment s JOIN seal ON seal.record = s.record WHERE s.node = NEW.node AND s.number = NEW.number - 1)
BEGIN SELECT RAISE(ABORT, 'a segment follows a sealed one'); END;

CREATE TRIGGER sealed_segment_is_final BEFORE UPDATE ON segment
WHEN OLD.sealed_at <> 0
BEGIN SELECT RAISE(ABORT, 'the segment is sealed'); END;

CREATE TRIGGER leaf_follows_leaf BEFORE INSERT ON leaf
WHEN NEW.position <> (SELECT ifnull(max(position), -1) + 1 FROM leaf WHERE node = NEW.node)
BEGIN SELECT RAISE(ABORT, 'leaves are added at the end'); END;

CREATE TRIGGER leaf_is_final BEFORE UPDATE ON leaf
BEGIN SELECT RAISE(ABORT, 'a leaf is never changed'); END;

CREATE TRIGGER leaf_stays BEFORE DELETE ON leaf
BEGIN SELECT RAISE(ABORT, 'a leaf is never deleted'); END;

CREATE TRIGGER ended_is_final BEFORE UPDATE ON session
WHEN OLD.state = 'ended'
BEGIN SELECT RAISE(ABORT, 'the session has ended'); END;

CREATE TRIGGER ended_is_sealed BEFORE UPDATE ON session
WHEN NEW.state = 'ended' AND NOT EXISTS (SELECT 1 FROM seal WHERE record = NEW.record)
BEGIN SELECT RAISE(ABORT, 'a session ends with its seal'); END;

CREATE TRIGGER generation_only_grows BEFORE UPDATE ON session
WHEN NEW.generation < OLD.generation OR NEW.record <> OLD.record OR NEW.id <> OLD.id
BEGIN SELECT RAISE(ABORT, 'a session keeps its id and record, and its generation only grows'); END;

CREATE TRIGGER session_is_never_deleted BEFORE DELETE ON session
BEGIN SELECT RAISE(ABORT, 'a session is never deleted'); END;

CREATE TRIGGER sandbox_is_never_deleted BEFORE DELETE ON sandbox
BEGIN SELECT RAISE(ABORT, 'a sandbox is never deleted'); END;
