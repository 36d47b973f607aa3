"""The leader's part of a tensor-parallel group: run every step, transfer and mapping on all ranks.

    engine -> GroupRunner   -> STEP to the ranks, then its own part: the collectives meet inside the model
    engine -> Transfer      -> RankMate: PUT, GET
    arena  -> GroupBacking  -> MAP, MAP_AHEAD, UNMAP

The ranks decide nothing. Their arenas are alike, so an id means the same memory on each of them.
"""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.memory.backing import Backing
from tidemill.kvstore.stores.page_store import finish
from tidemill.workers.execution.model_runner import Outputs, TorchRunner
from tidemill.workers.execution.mtp_drafter import DrawnEnd, MtpDrafter, ends_of
from tidemill.workers.execution.step import PENDING, Drawn, Step
from tidemill.workers.models.collectives import LEADER
from tidemill.workers.parallel.errors import GroupBroken
from tidemill.workers.parallel.exchange import Exchange, open_exchange
from tidemill.workers.parallel.frames import NONE, Verb, encode, encode_objects, ints
from tidemill.workers.parallel.link import RankLink, RankLinks, StartRanks, accept, meeting_place
from tidemill.workers.settings import EngineSettings, SettingsError
from tidemill.workers.transfer.transfer import Moved


class RankGroup:
    """The leader's connection to the other ranks of its worker."""

    def __init__(self, links: RankLinks, exchange: Exchange, device: torch.device) -> None:
        self.links = links
        self.exchange = exchange
        self.device = device  # of the leader

    def mates(self) -> "tuple[RankMate, ...]":
        return tuple(map(RankMate, self.links))

    def backing(self, own: Backing) -> "GroupBacking":
        return GroupBacking(own, self.links)

    def wait_until_ready(self) -> None:
        """Wait until every rank has loaded its weights and reserved its memory: an earlier call, other than
        an exchange, would end it. Raises GroupBroken."""
        for link in self.links:
            link.ready.result()

    async def watch(self) -> None:
        """Raise GroupBroken when a rank is gone."""
        await asyncio.wrap_future(self.links.broken)


@contextmanager
def open_group(
    settings: EngineSettings, start_ranks: StartRanks, device: torch.device
) -> Generator[RankGroup]:
    """Start the other ranks of this leader and connect to them. In the block the leader builds its own part,
    and waits for them. Raises GroupBroken and OSError; then, and when the block fails, the ranks end."""
    network = start_ranks.network
    if settings.tensor_parallel_nodes == 1:
        network = None
    elif network is None:
        raise SettingsError("--tensor-parallel-nodes is for a Ray cluster: leave it out, or run `serve`")
    with meeting_place(network) as place:
        ended = start_ranks.start(settings, place.meeting)
        links = accept(place, settings.tensor_parallel_size, ended, network)
        with ExitStack() as given_up:
            given_up.callback(links.end, "the leader does not start")
            exchange = open_exchange(settings, place.meeting, LEADER, device, network, place.store)
            given_up.enter_context(closing(exchange))
            group = RankGroup(links, exchange, device)
            yield group
            given_up.pop_all()


class GroupRunner(TorchRunner):
    """Runs each step on all ranks, and draws.

    A failure before the ranks know of a step, or after their last collective in it, fails only this step. Any
    other failure leaves some of them waiting for each other, and ends the group.
    """

    def __init__(self, group: RankGroup, vocab_size: int, *runner: Any) -> None:  # noqa: ANN401
        """Create a runner; `runner` are the arguments of the next class, which may be OverlappedRunner."""
        super().__init__(*runner)
        self._group, self._ranks = group, group.exchange.model
        self._vocab_size = vocab_size

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        """Raises GroupBroken, in the call or in the answer."""
        unknown = [token for row in step for token in row.tokens if not PENDING <= token < self._vocab_size]
        if unknown:  # every rank would break
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(ValueError(f"the model has no token {unknown[0]}"))
            return failed
        self._group.links.send_all(Verb.STEP, encode(step))
        return super().run(step)

    def run_now(self, step: Step) -> list[Drawn]:
        """Run a step; an empty one ends when all ranks have met."""
        if step:
            return super().run_now(step)
        self._group.exchange.control.broadcast(torch.zeros(1))
        return []

    def close(self) -> None:
        """End the other ranks, then the thread."""
        self._group.links.end("the engine was closed")
        super().close()
        self._group.exchange.close()

    def _outputs(self, step: Step, tokens: list[int]) -> Outputs:
        with self._together():
            return super()._outputs(step, tokens)

    def _draw(self, step: Step, outputs: Outputs) -> list[Drawn]:
        """Draw. With a prediction head, send the draws to the ranks, or that the step ends here."""
        if self._guesser is None:
            return super()._draw(step, outputs)
        ends_N2 = torch.full((len(step), len(DrawnEnd._fields)), NONE)
        try:
            drawn = super()._draw(step, outputs)
            ends_N2 = torch.tensor(ends_of(drawn))
        finally:
            self._group.exchange.control.broadcast(ends_N2)
        return drawn

    def _guess(
        self, guesser: MtpDrafter, step: Step, tokens: list[int], hidden_TH: torch.Tensor, drawn: list[Drawn]
    ) -> list[tuple[int, ...]]:
        with self._together():
            return super()._guess(guesser, step, tokens, hidden_TH, drawn)

    def _choose(self, logits_NV: torch.Tensor) -> torch.Tensor:
        chosen_N = super()._choose(logits_NV)
        self._share(chosen_N)
        return chosen_N

    @contextmanager
    def _together(self) -> Generator[None]:
        """Mark a block in which a failure leaves waiting ranks behind."""
        try:
            yield
        except Exception as error:
            reason = f"a step broke: {error}"
            self._group.links.end(reason)
            raise GroupBroken(reason) from error

    def _tokens(self, step: Step, last: Mapping[str, int]) -> list[int]:
        """Return the tokens, and send the ranks those that only the leader knows, or that there will be no
        step."""
        if not any(PENDING in row.tokens for row in step):
            return super()._tokens(step, last)
        tokens_T = torch.full((sum(len(row.tokens) for row in step),), NONE)
        try:
            tokens = super()._tokens(step, last)
            tokens_T = torch.tensor(tokens)
        finally:
            self._group.exchange.control.broadcast(tokens_T)
        return tokens


class RankMate:
    """The connection of the leader's Transfer to another rank."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    async def put(self, objects: Sequence[Moved]) -> int:
        return await self._move(Verb.PUT, objects)

    async def get(self, objects: Sequence[Moved]) -> int:
        return await self._move(Verb.GET, objects)

    async def _move(self, verb: Verb, objects: Sequence[Moved]) -> int:
        """Move the objects; a rank that is gone uses no memory."""
        try:
            answer = await finish(asyncio.wrap_future(self._link.ask(verb, encode_objects(objects))))
        except GroupBroken:
            return 0
        return int(answer[0])


class GroupBacking:
    """The leader's own backing. A range is mapped on every rank or on none."""

    def __init__(self, own: Backing, links: RankLinks) -> None:
        self.memory = own.memory
        self._own = own
        self._links = links

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        """Block until every rank has mapped its own. Raises OutOfMemory, GroupBroken."""
        answers = self._links.ask(Verb.MAP, ints((offset_bytes, num_bytes)))
        refused: OutOfMemory | None = None
        try:
            self._own.map(offset_bytes, num_bytes)
        except OutOfMemory as error:
            refused = error
        granted = [link for link, answer in zip(self._links, answers, strict=True) if answer.result()[0]]
        if refused is None and len(granted) == len(self._links):
            return
        for link in granted:
            link.send(Verb.UNMAP, ints((offset_bytes, num_bytes)))
        if refused is None:
            self._own.unmap(offset_bytes, num_bytes)
            refused = OutOfMemory(f"a rank of the group is not granted {num_bytes:,} bytes of memory")
        raise refused

    def map_ahead(self, offset_bytes: int, num_bytes: int) -> None:
        self._links.send_all(Verb.MAP_AHEAD, ints((offset_bytes, num_bytes)))
        self._own.map_ahead(offset_bytes, num_bytes)

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        self._links.send_all(Verb.UNMAP, ints((offset_bytes, num_bytes)))
        self._own.unmap(offset_bytes, num_bytes)

    def close(self) -> None:
        """Close the leader's backing; the ranks free theirs when they end."""
        self._own.close()
