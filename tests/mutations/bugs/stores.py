"""Bugs to plant in the page stores."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "a page's key does not depend on the pages before it",
        "kvstore/keys.py::chain",
        'return $DIGEST($PARENT, $PACK(f"<{len(page)}I", *$PAGE))',
        'return $DIGEST(b"", $PACK(f"<{len(page)}I", *$PAGE))',
        "tests/unit/kvstore/test_keys.py",
    ),
    Planted(
        "all shards of an object have one name",
        "kvstore/keys.py::ObjectKey.__str__",
        'return f"{self.key.hex()}.{self.shard:04x}.{self.kind.value}"',
        'return f"{self.key.hex()}.0000.{self.kind.value}"',
        "tests/unit/kvstore/test_keys.py",
    ),
    Planted(
        "a window page is freed while the next token reads it",
        "kvstore/layout.py::Layout.first_visible_window",
        "return max(0, $DEPTH - $SEEN) // self.$PAGE_TOKENS",
        "return -(-max(0, $DEPTH - $SEEN) // self.$PAGE_TOKENS)",
        "tests/unit/kvstore/test_layout.py tests/unit/kvstore/memory/test_ledger.py",
    ),
    Planted(
        "every rank publishes its copy of a shared page",
        "kvstore/shards.py::rank_share",
        ", $PUBLISHES_PAGES=$RANK % max(1, $SIZE // $SHARDS.$PAGES) == 0, $PUBLISHES_WINDOWS",
        ",\n        $PUBLISHES_PAGES=$RANK >= 0,\n        $PUBLISHES_WINDOWS",
        "tests/unit/kvstore/test_shards.py tests/unit/workers/transfer/test_transfer.py",
    ),
    Planted(
        "a rank holds the shards of another rank",
        "kvstore/shards.py::_range",
        "$FIRST = $RANK * $COUNT // $SIZE",
        "$FIRST = ($SIZE - 1 - $RANK) * $COUNT // $SIZE",
        "tests/unit/kvstore/test_shards.py tests/unit/workers/transfer/test_transfer.py",
    ),
    Planted(
        "an unanswered put leaves the breaker closed",
        "kvstore/stores/circuit_breaker.py::GuardedStore._move",
        ") if $LOST in $OUTCOMES: $FAIL() $DONE",
        ")\n        $DONE",
        "tests/unit/kvstore/stores/test_circuit_breaker.py",
    ),
    Planted(
        "the folder's bound ignores writes that other processes announced",
        "kvstore/stores/folder_bound.py::_count_reservations",
        "$OBJECTS + $LEFT.$OBJECTS, $TOTAL.bytes + $LEFT.",
        "$OBJECTS, $TOTAL.",
        "tests/unit/kvstore/stores/test_file_store.py tests/unit/kvstore/stores/test_file_store_faults.py",
    ),
    Planted(
        "the second writer of an object believes that it stored it",
        "kvstore/stores/object_folder.py::_link",
        "return False",
        "return True",
        "tests/unit/kvstore/stores/test_file_store.py tests/unit/kvstore/stores/test_file_store_faults.py",
    ),
    Planted(
        "a put is trusted without confirmation",
        "kvstore/stores/remote_store.py::_confirm",
        "return $PUT.$UNCONFIRMED if $SAID is $PUT.$STORED else $SAID",
        "return $SAID",
        "tests/unit/kvstore/stores/test_remote_store.py",
    ),
    Planted(
        "a remote store gets a checkpoint in one batch with its pages",
        "kvstore/stores/remote_store.py::RemoteStore._batches",
        "$KEY.$KIND is not $OBJECTS[$START][0].$KIND",
        "$KEY.$KIND is None",
        "tests/unit/kvstore/stores/test_remote_store.py",
    ),
    Planted(
        "a shard is accepted under another shard's name",
        "kvstore/stores/seal.py::Sealing.seal",
        ", $KEY.$SHARD, $KEY",
        ", 0, $KEY",
        "tests/unit/kvstore/stores/test_seal.py",
    ),
    Planted(
        "a symbolic link in place of an object is followed",
        "kvstore/stores/object_folder.py::ObjectFolder._load",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        "tests/unit/kvstore/stores/test_file_store_faults.py",
    ),
)
