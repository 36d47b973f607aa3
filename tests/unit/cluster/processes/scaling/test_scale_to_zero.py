"""The scaler ends all workers of a fleet without requests, and starts them with the next one."""

from dataclasses import dataclass

from tests.support.grpc_loop import in_loop
from tests.unit.cluster.processes.scaling.test_scaler import IDLE, LOOK_S, STREAM, Case, fleet
from tidemill.cluster.messages import Bounds, Hysteresis, Misses
from tidemill.cluster.processes.scaling.autoscaling import EDGE_SILENT_S_MAX, EdgeReports, EdgeState
from tidemill.cluster.processes.scaling.scaler import IDLE_CHECKS
from tidemill.cluster.settings import FleetSettings

ZERO_S = 60.0
ENDS_S = LOOK_S * (IDLE_CHECKS + 1)
FIRST = ["decode-0", "prefill-0"]
FLEET = fleet({"decode": Bounds(least=1, most=4)}, Hysteresis(zero_s=ZERO_S), cold_start_s_max=300.0)


@dataclass
class ZeroCase(Case):
    """A case with one edge, which reports before each check."""

    fleet: FleetSettings = FLEET
    now_s: float = 1000.0
    num_open: int = 0

    def __post_init__(self) -> None:
        self.cluster.refuses_drain = frozenset(FIRST)  # each is the last of its role
        super().__post_init__()

    def report(self, misses: Misses = Misses()) -> None:  # noqa: B008 - frozen
        state = EdgeState(at_s=self.now_s, resets=0, open_requests=self.num_open)
        self.reports.add("edge", misses, state)

    async def advance(self, seconds: float = LOOK_S, *, serves: bool = True) -> None:
        for _ in range(int(seconds / LOOK_S)):
            if serves:
                self.report()
            await super().advance()

    def names(self, state: str = "ready") -> list[str]:
        del state
        return sorted(self.cluster.workers)


@in_loop
async def test_idle_fleet_ends_and_the_next_request_starts_it_under_its_old_names() -> None:
    case = ZeroCase()
    await case.advance(ZERO_S)
    assert case.names() == FIRST
    assert not case.cluster.drained
    await case.advance(ENDS_S)
    assert sorted(case.cluster.forced) == sorted(case.cluster.removed) == FIRST
    await case.advance(10 * ZERO_S)
    assert case.names() == [], "the minimum of a role is for a fleet with requests"
    case.num_open = 1
    await case.advance()
    assert case.names() == FIRST
    await case.advance(10 * ZERO_S)
    assert case.names() == FIRST


@in_loop
async def test_fleet_without_the_setting_keeps_its_workers() -> None:
    case = ZeroCase(fleet({"decode": Bounds(least=1, most=4)}))
    await case.advance(20 * ZERO_S)
    await case.scaler.wake()
    assert case.names() == FIRST


@in_loop
async def test_short_answers_between_two_reports_and_starting_workers_count_as_use() -> None:
    case = ZeroCase()
    for _ in range(8):
        await case.advance(ZERO_S - LOOK_S)
        case.report(Misses(answered=1))
    assert case.names() == FIRST
    hidden, case.cluster.workers = case.cluster.workers, {}  # they start again, and it takes long
    await case.advance(5 * ZERO_S)
    case.cluster.workers = hidden
    await case.advance(ZERO_S - LOOK_S)
    assert not case.cluster.drained


@in_loop
async def test_time_without_requests_begins_when_an_edge_serves() -> None:
    """Another model of the server, or its edges, may take long to start."""
    case = ZeroCase()
    await case.advance(5 * ZERO_S, serves=False)
    await case.advance(ZERO_S - LOOK_S)
    assert not case.cluster.drained
    await case.advance(ENDS_S)
    assert case.names() == []


@in_loop
async def test_workers_that_are_leaving_are_gone_before_the_next_ones_start() -> None:
    """Two workers of one name or on one device would be too many."""
    case = ZeroCase()
    await case.advance(ZERO_S + LOOK_S)
    case.cluster.set_load(STREAM)
    case.num_open = 1
    await case.advance(5 * LOOK_S)
    assert case.names() == FIRST
    assert not case.cluster.removed
    case.cluster.set_load(IDLE)
    await case.advance(ENDS_S)
    assert sorted(case.cluster.removed) == FIRST
    assert case.names() == FIRST, "they are new ones"
    assert {worker.state for worker in case.cluster.workers.values()} == {"ready"}


@in_loop
async def test_supervisor_that_restarts_keeps_a_fleet_at_zero_until_a_server_or_a_request_comes() -> None:
    case = ZeroCase()
    await case.advance(ZERO_S + ENDS_S)
    case.restart_supervisor()
    await case.advance(5 * LOOK_S)
    assert case.names() == []
    await case.scaler.wake()
    assert case.names() == FIRST
    await case.advance(ZERO_S)
    assert case.names() == FIRST, "its time without requests begins with its start"
    await case.advance(ENDS_S)
    assert case.names() == []


@in_loop
async def test_operator_can_start_workers_of_a_fleet_at_zero() -> None:
    case = ZeroCase()
    await case.advance(ZERO_S + ENDS_S)
    await case.scaler.scale({"decode": 2}, pending=False)
    assert case.names() == ["decode-0", "decode-1"]
    await case.advance(ZERO_S)
    assert len(case.names()) == 2


def test_open_requests_of_an_edge_that_is_gone_do_not_count() -> None:
    reports = EdgeReports()
    reports.add("a", Misses(), EdgeState(at_s=0.0, resets=1, open_requests=2))
    reports.add("b", Misses(), EdgeState(at_s=2.0, resets=1, open_requests=3))
    assert reports.open_requests(2.0) == 5
    assert reports.open_requests(EDGE_SILENT_S_MAX) == 3
    assert reports.open_requests(EDGE_SILENT_S_MAX + 2.0) == 0
