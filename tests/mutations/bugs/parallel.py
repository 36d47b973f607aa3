"""Bugs to plant in the ranks of a tensor-parallel group."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "a leader lets callers in that do not know its group",
        "workers/parallel/link.py::_index",
        "if $COMPARE_DIGEST($DATA, $HELLO($INDEX, $MEETING)):",
        "if len(data) == size_bytes:",
        "tests/unit/workers/parallel/test_network.py",
    ),
    Planted(
        "a leader asks ranks for no certificate",
        "cluster/mutual_tls.py::MutualTls._context",
        "$CONTEXT.$VERIFY_MODE = $SSL.$CERT_REQUIRED",
        "context.verify_mode = ssl.CERT_REQUIRED if context.check_hostname else ssl.CERT_NONE",
        "tests/unit/workers/parallel/test_network.py",
    ),
    Planted(
        "the store of a group listens on every interface",
        "workers/parallel/distributed.py::port_stores",
        '"is_master": True, "master_listen_fd": $LISTENER.$DETACH()',
        '"is_master": listener.close() is None',
        "tests/unit/workers/parallel/test_network.py",
    ),
    Planted(
        "sums over gloo depend on the position in the tensor",
        "workers/parallel/distributed.py::Distributed.reduce",
        'if self.$TRANSPORT == "gloo":',
        "if False:",
        "tests/unit/workers/parallel/test_collectives.py",
    ),
    Planted(
        "ranks take different amounts of memory",
        "workers/parallel/exchange.py::Exchange.least",
        ".$MIN())",
        "[0, self.control.index])",
        "tests/unit/workers/parallel/test_device_group.py",
    ),
    Planted(
        "exact and fast groups share pages",
        "workers/engine/build.py::namespace_of",
        "{$PRODUCTS}{$SETTINGS.$SUMS_NAMESPACE}",
        "{$PRODUCTS}",
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
        "a rank continues after its step failed",
        "workers/parallel/rank.py::_Obeying._ended",
        "if $ERROR is not None and not self.$BROKEN.$DONE():",
        "if $ERROR is not None and self.$BROKEN.$DONE():",
        "tests/unit/workers/parallel/test_link.py::test_rank_whose_step_raises_reports_it_and_ends",
    ),
)
