"""The tables of the database, made where they are missing. A later version may add tables and columns.

Each response belongs to a conversation, whose items have positions: it saw those below `num_input`, and
its own output ends at `num_items`. A chain of responses shares one conversation without a name, which a
second answer to an earlier response copies. All of a conversation expires together.
"""

TABLES = (
    """CREATE TABLE IF NOT EXISTS tidemill_conversations (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        is_named BIGINT NOT NULL,
        created_s BIGINT NOT NULL,
        expires_s BIGINT NOT NULL,
        length BIGINT NOT NULL,
        metadata TEXT NOT NULL
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
    """CREATE TABLE IF NOT EXISTS tidemill_responses (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        conversation TEXT NOT NULL REFERENCES tidemill_conversations (id) ON DELETE CASCADE,
        num_input BIGINT NOT NULL,
        num_items BIGINT NOT NULL,
        body TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS tidemill_of_conversation ON tidemill_responses (conversation)",
)
