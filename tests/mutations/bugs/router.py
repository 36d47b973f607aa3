"""Bugs to plant in the router."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "compiled placement sums in another order",
        "cluster/router/placement.cpp",
        "+ locality + crowding_penalty($W, slots[$N]) +",
        "+ (locality + 1.05 * crowding_penalty($W, slots[$N])) +",
        "tests/unit/cluster/router/test_compiled.py",
    ),
    Planted(
        "the compiled prefix table forgets the newest keys",
        "cluster/router/placement.cpp",
        "std::reverse(kept.begin(), kept.end());",
        "",
        "tests/unit/cluster/router/test_compiled.py",
    ),
    Planted(
        "the client's deadline covers only the wait",
        "cluster/router/admission.py::LoadShedder.admit",
        "($WAIT_S if $ASK.$TTFT_S_MAX is None else $PREDICTED_S)",
        "$WAIT_S",
        "tests/unit/cluster/router/test_admission.py",
    ),
    Planted(
        "a tenant that was idle is owed the time",
        "cluster/router/fair_queueing.py::FairQueue._start",
        "return max(self.$VIRTUAL, self.$ENDS.$GET($TENANT, self.$VIRTUAL))",
        "return self.$ENDS.$GET($TENANT, 0.0)",
        "tests/unit/cluster/router/test_admission.py",
    ),
    Planted(
        "a restarted worker keeps its earlier incarnation",
        "cluster/router/fleet_view.py::Fleet._apply_heartbeat",
        "if $EARLIER is not None and $EARLIER != $INFO.$WORKER:",
        "if $EARLIER is not None and $EARLIER == $INFO.$WORKER:",
        "tests/unit/cluster/router/test_fleet_view.py",
    ),
    Planted(
        "a gap in the heartbeats goes unnoticed",
        "cluster/router/fleet_view.py::wants_full_announcement",
        "!= $MEMBER.$SEQUENCE + 1",
        "< $MEMBER.$SEQUENCE",
        "tests/unit/cluster/router/test_fleet_view.py",
    ),
    Planted(
        "a restarted router cancels drains",
        "cluster/router/operator_commands.py::OperatorCommands.confirm",
        '"" if $IS_NEW and $DRAINING: self.$DRAINED[$INFO.$NAME] = $INFO.$WORKER return',
        '""\n        return',
        "tests/unit/cluster/router/test_router.py",
    ),
    Planted(
        "two workers that depend on each other can both be drained",
        "cluster/router/operator_commands.py::OperatorCommands._check_others",
        "$INFO or $MEMBER.$DRAINING or self.$IS_DRAINED($OTHER) if",
        "$INFO\n            if",
        "tests/unit/cluster/router/test_router.py",
    ),
    Planted(
        "a prompt is computed by a worker of another version",
        "cluster/router/placement.py::_computes_alone",
        "[$PREFILL.$MEMBER.$SLOT]",
        "",
        "tests/unit/cluster/router/test_placement.py",
    ),
    Planted(
        "placement counts pages without a checkpoint as restorable",
        "cluster/router/placement.py::_View.__init__",
        "$NP.$WHERE($HYBRID, self.$ANNOUNCED, self.$RESIDENT)",
        "self.$RESIDENT",
        "tests/unit/cluster/router/test_placement.py",
    ),
    Planted(
        "a quarantined request may run again immediately",
        "cluster/router/quarantine.py::Quarantine.add",
        "self.$UNTIL_S[$CONTENT] = $NOW_S + $QUARANTINE_S",
        "self.$UNTIL_S[$CONTENT] = $NOW_S",
        "tests/unit/cluster/router/test_router.py",
    ),
    Planted(
        "a new worker does not wake waiting placements",
        "cluster/router/router.py::Router._wake",
        "self.$CHANGED.set()",
        "pass",
        "tests/unit/cluster/router/test_router.py",
    ),
)
