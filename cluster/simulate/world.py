"""One trace through one cluster in virtual time: arrivals, a router, workers, and an outcome."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from zlib import crc32

from tidemill.cluster.edge import flow
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.fleet_view import RequestBooked
from tidemill.cluster.router.router import Router
from tidemill.cluster.simulate.block_cache import BlockCache, Stored
from tidemill.cluster.simulate.clock import run_virtual
from tidemill.cluster.simulate.engines import EngineWorker, root_of
from tidemill.cluster.simulate.heartbeats import SimHeartbeats
from tidemill.cluster.simulate.model import ModelWorker
from tidemill.cluster.simulate.policies import OURS, PolicyRouter
from tidemill.cluster.simulate.report import Outcome, SimulatedRequest
from tidemill.cluster.simulate.setup import Setup
from tidemill.cluster.simulate.sized_store import SizeOnlyStore
from tidemill.cluster.simulate.trace import BLOCK_TOKENS, TraceRequest, by_client
from tidemill.workers.inbox import Emit
from tidemill.workers.messages import (
    Ack,
    Delta,
    EngineInfo,
    Heartbeat,
    Overloaded,
    Produced,
    Request,
    Sampling,
    StreamPiece,
    Trace,
    Unserved,
    WorkerId,
)


def simulate(requests: Sequence[TraceRequest], setup: Setup) -> Outcome:
    """Raises UnknownPolicy."""
    return run_virtual(_run(requests, setup))


async def _run(requests: Sequence[TraceRequest], setup: Setup) -> Outcome:
    """Serve each request from its arrival on. Return when all have ended."""
    clock = asyncio.get_running_loop().time
    cluster = _ModelCluster(setup) if setup.engine == "model" else _EngineCluster(setup)
    workers, outcome = list(cluster.workers.values()), cluster.outcome
    router = _SimRouter(setup, workers)
    await asyncio.sleep(0)  # the first heartbeats
    async with asyncio.TaskGroup() as tasks:
        for chain in by_client(requests):
            await asyncio.sleep(chain[0][1].at_s - clock())
            tasks.create_task(_serve_in_turn(chain, cluster, router))
    router.close()
    outcome.makespan_s = clock()
    for worker in workers:
        outcome.busy_s.setdefault(worker.info.role, []).append(worker.busy_s)
    for worker in workers:
        if isinstance(worker, EngineWorker):
            await worker.stop()
            for name, count in worker.ledger.counters.items():
                outcome.counters[name] = outcome.counters.get(name, 0) + count
    return outcome


async def _serve_in_turn(
    chain: Sequence[tuple[int, TraceRequest]], cluster: "_ModelCluster | _EngineCluster", router: "_SimRouter"
) -> None:
    """Serve the requests of one client, from the time of the first one on."""
    clock = asyncio.get_running_loop().time
    for index, (number, request) in enumerate(chain):
        if index:
            await asyncio.sleep(request.pause_s)
            request = replace(request, at_s=clock())  # noqa: PLW2901  it arrives now
        await cluster.serve(request, number, router)


class _SimRouter:
    """Routers of the product with the heartbeats of the workers, or a policy."""

    def __init__(self, setup: Setup, workers: Sequence[EngineWorker | ModelWorker]) -> None:
        """Raises UnknownPolicy."""
        clock = asyncio.get_running_loop().time
        self._heartbeats: list[SimHeartbeats] = []
        self._setup = setup
        if setup.policy == OURS:
            routers = [Router(clock, broker=False, compiled=setup.compiled) for _ in range(setup.routers)]
            self._heartbeats = [
                SimHeartbeats(worker, partial(_to_all, routers), setup.heartbeat_s) for worker in workers
            ]
            self._routers: Sequence[Router | PolicyRouter] = routers
            if setup.share_s is not None:
                for router in routers:
                    router.on_booked = partial(
                        _share, [other for other in routers if other is not router], setup.share_s
                    )
        else:
            self._routers = [PolicyRouter(setup.policy, workers, clock, setup.seed)]

    def close(self) -> None:
        for heartbeats in self._heartbeats:
            heartbeats.stop()

    async def place(self, request: PlacementRequest) -> Route:
        family = request.keys[0] if request.keys and self._setup.spread == "family" else b""
        edge = crc32(request.request_id.encode()) % self._setup.edges
        index = crc32(family) if family else edge
        return await self._routers[index % len(self._routers)].place(request)

    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        del blamed
        raise AssertionError(f"{worker} was lost: nothing breaks in a simulation")


def _share(others: Sequence[Router], delay_s: float, booked: Sequence[RequestBooked]) -> None:
    for other in others:
        asyncio.get_running_loop().call_later(delay_s, other.book, booked)


def _to_all(routers: Sequence[Router], heartbeat: Heartbeat) -> Ack:
    acks = [router.heartbeat(heartbeat) for router in routers]
    return replace(acks[0], want_full=any(ack.want_full for ack in acks))


class _ModelCluster:
    """Workers that are formulas: a prompt is computed, then its answer streams."""

    def __init__(self, setup: Setup) -> None:
        self.outcome = Outcome()
        self._ttft_s_max = setup.ttft_s_max
        stored, slots = Stored(hybrid=setup.hybrid), setup.slots if setup.hybrid else None
        self.workers = {
            info.worker: ModelWorker(
                info, setup.cost, BlockCache(setup.blocks if info.role != "decode" else 0, slots), stored
            )
            for info in setup.infos()
        }

    async def serve(self, request: TraceRequest, number: int, router: _SimRouter) -> None:
        clock, outcome = asyncio.get_running_loop().time, self.outcome
        keys = tuple(block.to_bytes(8, "little") for block in request.blocks[: request.full_blocks])
        placement_request = PlacementRequest(
            request_id=str(number),
            keys=keys,
            num_tokens=request.prompt_tokens,
            max_new_tokens=request.answer_tokens,
            ttft_s_max=self._ttft_s_max,
        )
        try:
            route = await router.place(placement_request)
        except Overloaded:
            outcome.refused += 1
            return
        except Unserved:
            outcome.failed += 1
            return
        worker = self.workers[route.prefill or route.decode]
        reused, fetched = await worker.compute(keys, request.prompt_tokens)
        outcome.served.append(
            SimulatedRequest(
                at_s=request.at_s,
                ttft_s=clock() - request.at_s,
                predicted_s=route.predicted_s,
                prompt_tokens=request.prompt_tokens,
                reused_tokens=reused + fetched,
                fetched_tokens=fetched,
                skipped_prefill=route.prefill is None,
            )
        )
        gap_s = await self.workers[route.decode].answer(request)
        outcome.gaps_s.extend([gap_s] * (request.answer_tokens - 1))


class _EngineCluster:
    """Real engines behind the edge's flow, which calls `produce`, `prefetch` and `generate`."""

    def __init__(self, setup: Setup) -> None:
        self.outcome = Outcome()
        self._setup = setup
        self._layout = setup.layout
        store = SizeOnlyStore(self._layout, setup.store_bytes)
        self.workers = {
            info.worker: EngineWorker(
                info, self._layout, setup.cost, store, setup.eviction, rows_max=setup.rows_max
            )
            for info in setup.infos()
        }
        self._sent_at_s: dict[str, float] = {}  # to the decode worker, by request

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        del address
        return await self.workers[worker].produce(request)

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        del address
        await self.workers[worker].prefetch(request)

    async def stream(self, worker: WorkerId, address: str, request: Request, emit: Emit[Delta]) -> None:
        del address
        self._sent_at_s[request.request_id] = asyncio.get_running_loop().time()
        await self.workers[worker].stream(request, emit)

    async def serve(self, request: TraceRequest, number: int, router: _SimRouter) -> None:
        clock, outcome, grain = asyncio.get_running_loop().time, self.outcome, self._setup.grain
        last_s = 0.0
        is_busy = any(worker.rows for worker in self.workers.values())
        await asyncio.sleep(self._setup.request_s + is_busy * self._setup.busy_s)

        def record(piece: StreamPiece) -> None:
            nonlocal last_s
            now_s = clock()
            if last_s:
                outcome.gaps_s.append((now_s - last_s) / grain)
            else:
                decode_s = now_s - self._sent_at_s.pop(str(number))
                excess_s = self._excess_s(decode_s, piece.trace, request)
                ttft_s = now_s - request.at_s - excess_s
                outcome.served.append(_served(request, ttft_s, piece.trace, grain))
            last_s = now_s

        asked = self._engine_request(request, number)
        try:
            info = EngineInfo(page_tokens=self._layout.page_tokens)
            await flow.serve(asked, router, self, root_of, info, record)
        except Overloaded:
            outcome.refused += 1
        except Unserved:
            outcome.failed += 1

    def _excess_s(self, decode_s: float, trace: Trace, request: TraceRequest) -> float:
        """Return the error in the time from the call of the decode worker to its first token. A request waits
        there for steps of streams that are `grain` times as long as the real ones."""
        computed = min(request.prompt_tokens, trace.provenance.computed_tokens * self._setup.grain)
        compute_s = self._setup.cost.tokens_s(request.prompt_tokens - computed, request.prompt_tokens)
        return max(0.0, decode_s - compute_s) * (1 - 1 / self._setup.grain)

    def _engine_request(self, request: TraceRequest, number: int) -> Request:
        """Use the names of blocks as tokens, so that equal names are equal prefixes."""
        grain, size = self._setup.grain, BLOCK_TOKENS // self._setup.grain
        marked, hinted = self._setup.hints != "none", self._setup.hints == "all"
        tokens = [block for block in request.blocks for _ in range(size)]
        return Request(
            request_id=str(number),
            tokens=tuple(tokens[: -(-request.prompt_tokens // grain)]),
            max_new_tokens=-(-request.answer_tokens // grain),
            sampling=Sampling(seed=number),
            ttft_s_max=self._setup.ttft_s_max,
            breakpoints=tuple(depth // grain for depth in request.hints.breakpoints) if marked else (),
            session=request.hints.session if hinted else "",
            retain_s=request.hints.retain_s if hinted else 0.0,
        )


def _served(request: TraceRequest, ttft_s: float, trace: Trace, grain: int) -> SimulatedRequest:
    """Count the tokens that the prefill worker found, or without one, the decode worker."""
    found = trace.provenance if trace.produced is None else trace.produced.provenance
    return SimulatedRequest(
        at_s=request.at_s,
        ttft_s=ttft_s,
        prompt_tokens=request.prompt_tokens,
        reused_tokens=min(request.prompt_tokens, (found.reused_tokens + found.fetched_tokens) * grain),
        fetched_tokens=found.fetched_tokens * grain,
        attempts=trace.attempts,
        skipped_prefill=trace.prefill is None,
    )
