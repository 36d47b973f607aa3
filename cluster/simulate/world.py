"""One trace through one cluster in virtual time: arrivals, a router, workers; what became of each request."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from random import Random

from tidemill.cluster.edge import flow
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.router import Router
from tidemill.cluster.simulate.block_cache import BlockCache, Stored
from tidemill.cluster.simulate.clock import run_virtual
from tidemill.cluster.simulate.engines import EngineWorker, root_of
from tidemill.cluster.simulate.heartbeats import SimHeartbeats
from tidemill.cluster.simulate.model import ModelWorker
from tidemill.cluster.simulate.policies import OURS, PolicyRouter, WorkerView, policy_of
from tidemill.cluster.simulate.report import Outcome, SimulatedRequest
from tidemill.cluster.simulate.setup import Setup
from tidemill.cluster.simulate.sized_store import SizeOnlyStore
from tidemill.cluster.simulate.trace import TraceRequest
from tidemill.workers.messages import (
    Delta,
    Overloaded,
    Produced,
    Request,
    Sampling,
    Trace,
    Unserved,
    WorkerId,
    WorkerInfo,
)


def simulate(items: Sequence[TraceRequest], setup: Setup) -> Outcome:
    """Raises UnknownPolicy."""
    return run_virtual(_Models(setup).run(items) if setup.engine == "model" else _Engines(setup).run(items))


class _SimRouter:
    """Who places, and the heartbeats of those that it places on."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._clock = asyncio.get_running_loop().time
        self._router = Router(self._clock, broker=False)
        self._policy: PolicyRouter | None = None
        self._beats: list[SimHeartbeats] = []

    def open(self, workers: Sequence[tuple[EngineWorker | ModelWorker, "_DirtyFlag"]]) -> None:
        """Raises UnknownPolicy."""
        if self._setup.policy == OURS:
            for worker, touch in workers:
                touch.beats = SimHeartbeats(worker, self._router.heartbeat)
                self._beats.append(touch.beats)
            return
        policy = policy_of(self._setup.policy, Random(self._setup.seed))  # noqa: S311 - a policy's dice
        seats: list[WorkerView] = [worker for worker, _ in workers]
        self._policy = PolicyRouter(policy, seats, self._clock)

    def close(self) -> None:
        for beats in self._beats:
            beats.stop()

    async def place(self, ask: PlacementRequest) -> Route:
        return await (self._router if self._policy is None else self._policy).place(ask)

    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        del blamed
        raise AssertionError(f"{worker} was lost: nothing breaks in a simulation")


class _Models:
    """With workers that are formulas: a request is computed, then it streams."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._outcome = Outcome()
        self._stored = Stored(hybrid=setup.hybrid)
        self._workers: dict[WorkerId, ModelWorker] = {}

    async def run(self, items: Sequence[TraceRequest]) -> Outcome:
        desk = _SimRouter(self._setup)
        desk.open([self._start(info) for info in self._setup.infos()])
        await _arrive(items, lambda item, number: self._serve(item, number, desk))
        desk.close()
        _measure(self._outcome, list(self._workers.values()))
        return self._outcome

    def _start(self, info: WorkerInfo) -> "tuple[ModelWorker, _DirtyFlag]":
        setup, touch = self._setup, _DirtyFlag()
        blocks = BlockCache(
            setup.blocks if info.role == "prefill" else 0, setup.slots if setup.hybrid else None
        )
        worker = self._workers[info.worker] = ModelWorker(info, setup.cost, blocks, self._stored, touch)
        return worker, touch

    async def _serve(self, item: TraceRequest, number: int, desk: _SimRouter) -> None:
        clock, outcome = asyncio.get_running_loop().time, self._outcome
        keys = tuple(block.to_bytes(8, "little") for block in item.blocks[: item.full_blocks])
        ask = PlacementRequest(
            request_id=str(number),
            keys=keys,
            num_tokens=item.prompt_tokens,
            max_new_tokens=item.answer_tokens,
            ttft_s_max=self._setup.ttft_s_max,
        )
        try:
            route = await desk.place(ask)
        except Overloaded:
            outcome.refused += 1
            return
        except Unserved:
            outcome.failed += 1
            return
        computes = self._workers[route.prefill or route.decode]
        reused, fetched = await computes.compute(keys, item.prompt_tokens)
        outcome.served.append(
            SimulatedRequest(
                at_s=item.at_s,
                ttft_s=clock() - item.at_s,
                predicted_s=route.predicted_s,
                prompt_tokens=item.prompt_tokens,
                reused_tokens=reused + fetched,
                fetched_tokens=fetched,
                skipped_prefill=route.prefill is None,
            )
        )
        gap_s = await self._workers[route.decode].answer(item)
        outcome.gaps_s.extend([gap_s] * (item.answer_tokens - 1))


class _Engines:
    """With real engines, and the flow over them: `produce`, `prefetch` and `generate` are its Peers."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._layout = setup.layout
        self._shelf = SizeOnlyStore(self._layout, setup.store_bytes)
        self._outcome = Outcome()
        self._workers: dict[WorkerId, EngineWorker] = {}
        self._sent_at_s: dict[str, float] = {}  # to the decode worker, by request

    async def run(self, items: Sequence[TraceRequest]) -> Outcome:
        desk = _SimRouter(self._setup)
        desk.open([self._start(info) for info in self._setup.infos()])
        await _arrive(items, lambda item, number: self._serve(item, number, desk))
        desk.close()
        _measure(self._outcome, list(self._workers.values()))
        for worker in self._workers.values():
            await worker.stop()
            for name, count in worker.ledger.counters.items():
                self._outcome.counters[name] = self._outcome.counters.get(name, 0) + count
        return self._outcome

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        del address
        return await self._workers[worker].produce(request)

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        del address
        await self._workers[worker].prefetch(request)

    def generate(self, worker: WorkerId, address: str, request: Request) -> AsyncGenerator[Delta]:
        del address
        self._sent_at_s[request.request_id] = asyncio.get_running_loop().time()
        return self._workers[worker].generate(request)

    def _start(self, info: WorkerInfo) -> "tuple[EngineWorker, _DirtyFlag]":
        touch = _DirtyFlag()
        worker = EngineWorker(info, self._layout, self._setup.cost, self._shelf, touch)
        self._workers[info.worker] = worker
        return worker, touch

    async def _serve(self, item: TraceRequest, number: int, desk: _SimRouter) -> None:
        clock, outcome, grain = asyncio.get_running_loop().time, self._outcome, self._setup.grain
        heard_s = 0.0
        request = self._request(item, number)
        try:
            pieces = flow.serve(request, desk, self, root_of, self._layout.page_tokens)
            async with aclosing(pieces) as stream:
                async for piece in stream:
                    now_s = clock()
                    if heard_s:
                        outcome.gaps_s.append((now_s - heard_s) / grain)
                    else:
                        over_s = self._overrated_s(
                            now_s - self._sent_at_s.pop(request.request_id), piece.trace, item
                        )
                        outcome.served.append(_served(item, now_s - item.at_s - over_s, piece.trace, grain))
                    heard_s = now_s
        except Overloaded:
            outcome.refused += 1
        except Unserved:
            outcome.failed += 1

    def _overrated_s(self, decode_s: float, trace: Trace, item: TraceRequest) -> float:
        """What is too much in the time from the decode worker's call to its first token: there a request
        waits for steps of streams, `grain` times as long as those that they stand for."""
        computed = min(item.prompt_tokens, trace.provenance.computed_tokens * self._setup.grain)
        compute_s = self._setup.cost.tokens_s(item.prompt_tokens - computed, item.prompt_tokens)
        return max(0.0, decode_s - compute_s) * (1 - 1 / self._setup.grain)

    def _request(self, item: TraceRequest, number: int) -> Request:
        """Its tokens are the names of its blocks: equal names are equal prefixes."""
        grain, size = self._setup.grain, self._layout.page_tokens
        tokens = [block for block in item.blocks for _ in range(size)]
        return Request(
            request_id=str(number),
            tokens=tuple(tokens[: -(-item.prompt_tokens // grain)]),
            max_new_tokens=-(-item.answer_tokens // grain),
            sampling=Sampling(seed=number),
            ttft_s_max=self._setup.ttft_s_max,
        )


def _served(item: TraceRequest, ttft_s: float, trace: Trace, grain: int) -> SimulatedRequest:
    """Of a prompt that went to a prefill worker, what that worker found counts."""
    found = trace.provenance if trace.produced is None else trace.produced.provenance
    return SimulatedRequest(
        at_s=item.at_s,
        ttft_s=ttft_s,
        prompt_tokens=item.prompt_tokens,
        reused_tokens=min(item.prompt_tokens, (found.reused_tokens + found.fetched_tokens) * grain),
        fetched_tokens=found.fetched_tokens * grain,
        attempts=trace.attempts,
        skipped_prefill=trace.prefill is None,
    )


async def _arrive(
    items: Sequence[TraceRequest], serve: Callable[[TraceRequest, int], Coroutine[None, None, None]]
) -> None:
    """Each in its time; until all have ended."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(0)  # the first heartbeats
    async with asyncio.TaskGroup() as requests:
        for number, item in enumerate(items):
            await asyncio.sleep(item.at_s - clock())
            requests.create_task(serve(item, number))


def _measure(outcome: Outcome, workers: Sequence[EngineWorker | ModelWorker]) -> None:
    outcome.makespan_s = asyncio.get_running_loop().time()
    for worker in workers:
        outcome.busy_s.setdefault(worker.info.role, []).append(worker.busy_s)


class _DirtyFlag:
    """Passes on that there is something new, once there are beats to pass it on to."""

    beats: SimHeartbeats | None = None

    def __call__(self) -> None:
        if self.beats is not None:
            self.beats.touch()
