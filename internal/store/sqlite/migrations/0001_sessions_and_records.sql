-- Sessions, their records, and who may call.
--
-- Times are microseconds since 1970 in UTC. Columns of a session beside spec
-- and body are there because a query needs them; body is the truth.

CREATE TABLE session (
    n          INTEGER PRIMARY KEY AUTOINCREMENT, -- order of creation; never shown
    id         TEXT    NOT NULL UNIQUE,
    version    INTEGER NOT NULL,
    state      TEXT    NOT NULL,
    owner      TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    ended_at   INTEGER NOT NULL, -- 0 until ended
    spec       TEXT    NOT NULL, -- JSON, written once
    body       TEXT    NOT NULL  -- JSON of everything else
) STRICT;
CREATE INDEX session_live ON session (n) WHERE state <> 'ended';
CREATE INDEX session_by_owner ON session (owner, n);

CREATE TABLE label (
    key     TEXT    NOT NULL,
    value   TEXT    NOT NULL,
    session INTEGER NOT NULL REFERENCES session (n),
    PRIMARY KEY (key, value, session)
) STRICT, WITHOUT ROWID;

CREATE TABLE event (
    n       INTEGER PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES session (n),
    seq     INTEGER NOT NULL,
    action  TEXT    NOT NULL,
    ref     TEXT    NOT NULL,
    raw     TEXT    NOT NULL, -- the skeleton's exact bytes, which hash is of
    hash    BLOB    NOT NULL,
    salt    BLOB,             -- NULL with payload: erased
    payload TEXT,
    UNIQUE (session, seq)
) STRICT;

CREATE TABLE seal (
    session  INTEGER PRIMARY KEY REFERENCES session (n),
    envelope TEXT NOT NULL
) STRICT;

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
    id         TEXT    PRIMARY KEY,
    hash       BLOB    NOT NULL UNIQUE,
    role       TEXT    NOT NULL,
    label      TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    created_by TEXT    NOT NULL,
    revoked_at INTEGER NOT NULL -- 0 while it is good
) STRICT, WITHOUT ROWID;

-- What the code promises, the database refuses to break.

CREATE TRIGGER event_is_never_deleted BEFORE DELETE ON event
BEGIN SELECT RAISE(ABORT, 'an event is never deleted'); END;

CREATE TRIGGER event_changes_only_by_erasure BEFORE UPDATE ON event
WHEN NEW.n <> OLD.n OR NEW.session <> OLD.session OR NEW.seq <> OLD.seq OR NEW.action <> OLD.action
  OR NEW.ref <> OLD.ref OR NEW.raw <> OLD.raw OR NEW.hash <> OLD.hash
  OR NEW.salt IS NOT NULL OR NEW.payload IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'an event changes only by erasure of its payload'); END;

CREATE TRIGGER seal_is_last BEFORE INSERT ON event
WHEN EXISTS (SELECT 1 FROM seal WHERE session = NEW.session)
BEGIN SELECT RAISE(ABORT, 'the record is sealed'); END;

CREATE TRIGGER seal_is_final BEFORE UPDATE ON seal
BEGIN SELECT RAISE(ABORT, 'a seal is never changed'); END;

CREATE TRIGGER seal_stays BEFORE DELETE ON seal
BEGIN SELECT RAISE(ABORT, 'a seal is never deleted'); END;

CREATE TRIGGER ended_is_final BEFORE UPDATE ON session
WHEN OLD.state = 'ended'
BEGIN SELECT RAISE(ABORT, 'the session has ended'); END;

CREATE TRIGGER ended_is_sealed BEFORE UPDATE ON session
WHEN NEW.state = 'ended' AND NOT EXISTS (SELECT 1 FROM seal WHERE session = NEW.n)
BEGIN SELECT RAISE(ABORT, 'a session ends with its seal'); END;

CREATE TRIGGER session_is_never_deleted BEFORE DELETE ON session
BEGIN SELECT RAISE(ABORT, 'a session is never deleted'); END;
