"""Bugs to plant in the ranks of a tensor-parallel group."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "exact and fast groups share pages",
        "workers/engine/build.py::namespace_of",
        "{$SETTINGS.$COMPUTE_DTYPE}{$SETTINGS.$SUMS_NAMESPACE}",
        "{$SETTINGS.$COMPUTE_DTYPE}",
        "tests/unit/workers/parallel/test_group_settings.py",
    ),
    Planted(
        "fast groups of different sizes share pages without the flag",
        "workers/settings.py::EngineSettings.sums_namespace",
        "if self.$ALLOW_INEXACT_GROUPS else self.$TENSOR_PARALLEL_SIZE",
        'if self.$ALLOW_INEXACT_GROUPS else "any"',
        "tests/unit/workers/parallel/test_group_settings.py",
    ),
    Planted(
        "every rank adds the bias of a sum",
        "workers/models/loading/sharding.py::part_of",
        "if $POSITION * $SIZE // $COUNT == $INDEX:",
        "if $POSITION * $SIZE // $COUNT <= $INDEX:",
        "tests/unit/workers/models/loading/test_sharding.py",
    ),
    Planted(
        "a rank runs the experts of lower ranks as its own",
        "kernels/moe/reference.py::own_experts",
        "($CHOSEN_TK >= $FIRST) & ($CHOSEN_TK < $END)",
        "($CHOSEN_TK < $END)",
        "tests/unit/kernels/test_moe.py",
    ),
    Planted(
        "ranks do not receive window pages",
        "workers/parallel/frames.py::_row",
        "), $WINDOWS=tuple(map($WINDOWID, $ISLICE($LEFT, $NUM_WINDOWS))), $DRAFTS=$DRAFTS",
        "),\n        $DRAFTS=$DRAFTS",
        "tests/unit/workers/parallel/test_frames.py",
    ),
    Planted(
        "ranks compute logprobs from the row's first token",
        "workers/parallel/frames.py::encode",
        "$ROW.$SCORES.$OFFSET,",
        "0,",
        "tests/unit/workers/parallel/test_frames.py",
    ),
    Planted(
        "a cancelled transfer leaves a rank writing to freed memory",
        "workers/parallel/group.py::RankMate._move",
        "$FINISH($ASYNCIO.$WRAP_FUTURE(self.$LINK.$ASK($VERB, $ENCODE_OBJECTS($OBJECTS)",
        "$ASYNCIO.$WRAP_FUTURE(self.$LINK.$ASK($VERB, $ENCODE_OBJECTS($OBJECTS",
        "tests/unit/workers/parallel/test_link.py",
    ),
    Planted(
        "an extent that one rank refused stays mapped on the others",
        "workers/parallel/group.py::GroupBacking.map",
        "return for $LINK in $GRANTED: $LINK.$SEND($VERB.$UNMAP, $INTS(($OFFSET_BYTES, $NUM_BYTES))) if",
        "return\n        if",
        "tests/unit/workers/parallel/test_link.py",
    ),
    Planted(
        "ranks wait for a step that the leader cancelled",
        "workers/parallel/group.py::GroupRunner._tokens",
        "self.$GROUP.$RANKS.$BROADCAST($TOLD_T)",
        "pass\n        self.$GROUP.$RANKS.$BROADCAST($TOLD_T)",
        "tests/unit/workers/parallel/test_group.py",
    ),
    Planted(
        "a request to a lost rank is never answered",
        "workers/parallel/link.py::RankLink._read",
        "$REASON self.$FAIL_ALL() self",
        "$REASON\n            self",
        "tests/unit/workers/parallel/test_link.py",
    ),
    Planted(
        "a rank under construction outlives its leader",
        "workers/parallel/rank.py::carry_out",
        "if not $BUILDING.$DONE(): return",
        "await $BUILDING",
        "tests/unit/workers/parallel/test_link.py",
    ),
    Planted(
        "a rank continues after its step failed",
        "workers/parallel/rank.py::_Obeying._ended",
        "if $ERROR is not None and not self.$BROKEN.$DONE():",
        "if $ERROR is not None and self.$BROKEN.$DONE():",
        "tests/unit/workers/parallel/test_link.py",
    ),
)
