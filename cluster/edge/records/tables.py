"""The tables of the database, made where they are missing. A later version may add tables and columns.

Each response belongs to a conversation, whose items have positions: it saw those below `num_input`, and
its own output ends at `num_items`. A chain of responses shares one conversation without a name, which a
second answer to an earlier response copies. All of a conversation expires together.

`stored_bytes` is what a record counts in the account of its tenant (`cluster/edge/records/account.py`).

A file is uploaded in parts, or has the lines of a batch that were answered, or that failed. A line is
journaled with its result, once: `is_error` is NULL before.
"""

TABLES = (
    """CREATE TABLE IF NOT EXISTS tidemill_accounts (
        name TEXT PRIMARY KEY,
        stored_bytes BIGINT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS tidemill_conversations (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        is_named BIGINT NOT NULL,
        created_s BIGINT NOT NULL,
        expires_s BIGINT NOT NULL,
        length BIGINT NOT NULL,
        metadata TEXT NOT NULL,
        stored_bytes BIGINT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS tidemill_expiring ON tidemill_conversations (expires_s)",
    """CREATE TABLE IF NOT EXISTS tidemill_items (
        conversation TEXT NOT NULL REFERENCES tidemill_conversations (id) ON DELETE CASCADE,
        position BIGINT NOT NULL,
        id TEXT NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (conversation, position)
    )""",
    "CREATE INDEX IF NOT EXISTS tidemill_item_ids ON tidemill_items (id)",
    "CREATE UNIQUE INDEX IF NOT EXISTS tidemill_item_cursors ON tidemill_items (conversation, id)",
    """CREATE TABLE IF NOT EXISTS tidemill_responses (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        conversation TEXT NOT NULL REFERENCES tidemill_conversations (id) ON DELETE CASCADE,
        num_input BIGINT NOT NULL,
        num_items BIGINT NOT NULL,
        body TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS tidemill_of_conversation ON tidemill_responses (conversation)",
    """CREATE TABLE IF NOT EXISTS tidemill_batches (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        key_digest TEXT NOT NULL,
        created_s BIGINT NOT NULL,
        expires_s BIGINT NOT NULL,
        is_open BIGINT NOT NULL,
        owner TEXT NOT NULL,
        leased_until_s BIGINT NOT NULL,
        body TEXT NOT NULL,
        stored_bytes BIGINT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS tidemill_open_batches ON tidemill_batches (is_open, leased_until_s)",
    "CREATE INDEX IF NOT EXISTS tidemill_batch_turns ON tidemill_batches (tenant, leased_until_s)",
    "CREATE INDEX IF NOT EXISTS tidemill_batch_pages ON tidemill_batches (tenant, created_s, id)",
    """CREATE TABLE IF NOT EXISTS tidemill_lines (
        batch TEXT NOT NULL REFERENCES tidemill_batches (id) ON DELETE CASCADE,
        number BIGINT NOT NULL,
        custom_id TEXT NOT NULL,
        sort_key BYTEA NOT NULL,
        body TEXT NOT NULL,
        is_error BIGINT,
        result BYTEA,
        PRIMARY KEY (batch, number)
    )""",
    "CREATE INDEX IF NOT EXISTS tidemill_results ON tidemill_lines (batch, is_error)",
    """CREATE TABLE IF NOT EXISTS tidemill_files (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        created_s BIGINT NOT NULL,
        expires_s BIGINT NOT NULL,
        num_bytes BIGINT,
        batch TEXT REFERENCES tidemill_batches (id) ON DELETE CASCADE,
        is_error BIGINT,
        stored_bytes BIGINT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS tidemill_file_pages ON tidemill_files (tenant, created_s, id)",
    """CREATE TABLE IF NOT EXISTS tidemill_parts (
        file TEXT NOT NULL REFERENCES tidemill_files (id) ON DELETE CASCADE,
        number BIGINT NOT NULL,
        body BYTEA NOT NULL,
        PRIMARY KEY (file, number)
    )""",
)
