# ruff: noqa: ANN401 - requests and configurations are those of vLLM
"""The half of the connector in vLLM's scheduler: what to load for a request, and what to save of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidemill.connect.groups import BlockMove, Groups
from tidemill.connect.store_thread import StoreThread
from tidemill.kvstore.keys import Kind, PageKey, extend_keys

NO_BLOCK = 0
"""vLLM's number of a block that it has freed, or never allocated because no query needs it."""


class Lookup(NamedTuple):
    """A question to the store: which of the blocks `[start, end)` of a request it holds."""

    start: int
    end: int
    held: "Future[list[bool]]"


@dataclass(slots=True)
class Tracked:
    """A request that vLLM has admitted, or asked for.

    keys        of its full blocks of known tokens
    saved       blocks up to here were computed before, or are saved
    has_failed  a load of it failed, so it computes
    """

    keys: list[PageKey] = field(default_factory=list[PageKey])
    lookup: Lookup | None = None
    saved: int | None = None
    has_failed: bool = False


class SchedulerSide:
    """Asks the store for prefixes while requests wait, and names the blocks of each step to move.

    Requests are vLLM's own; those with adapters, pictures, embeddings or input streams are left to
    vLLM.
    """

    def __init__(
        self,
        groups: Groups,
        root_of: Callable[[str], PageKey],
        store: StoreThread,
        *,
        loads: bool,
        saves: bool,
        only_prompts: bool,
    ) -> None:
        """Take roots of keys from `root_of(salt)`; save the tokens of prompts alone with `only_prompts`."""
        self._groups = groups
        self._root_of = root_of
        self._store = store
        self._loads = loads
        self._saves = saves
        self._only_prompts = only_prompts
        self._requests: dict[str, Any] = {}
        self._tracked: dict[str, Tracked] = {}
        self._pending_loads: dict[str, list[BlockMove]] = {}
        self._counted_trips = 0

    def match(self, request: Any, computed: int) -> int | None:
        """Return how many tokens can be loaded beyond `computed`, None while the store has not answered."""
        tracked = self._track(request)
        is_wanted = self._loads and not tracked.has_failed and not request.skip_reading_prefix_cache
        if not is_wanted or not _is_plain(request):
            return 0
        block = self._groups.block_tokens
        start, end = computed // block, (request.num_tokens - 1) // block  # the last token is computed
        if end <= start:
            return 0
        if tracked.lookup is None or tracked.lookup[:2] != (start, end):
            wanted = self._groups.candidates(self._keys(request, end)[:end], start)
            tracked.lookup = Lookup(start, end, self._store.contains(wanted))
        if not tracked.lookup.held.done():
            return None
        return (self._groups.deepest(start, end, tracked.lookup.held.result()) - start) * block

    def admit(self, request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Plan the load of `external` tokens into the blocks that vLLM has given the request."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.lookup is None:
            assert not external, "tokens are loaded that were not looked up"
            return
        if external:
            start = tracked.lookup.start
            # vLLM has given no block for what is not needed, and caches all that it has given.
            self._pending_loads[request.request_id] = [
                BlockMove(group, tracked.keys[index], blocks[index])
                for group, blocks in enumerate(block_ids)
                for index in range(start, start + external // self._groups.block_tokens)
                if blocks[index] != NO_BLOCK
            ]
        tracked.lookup = None

    def take_loads(self) -> dict[str, list[BlockMove]]:
        """Return the planned loads of each request, once."""
        loads, self._pending_loads = self._pending_loads, {}
        return loads

    def saves_of(
        self,
        request_id: str,
        tokens: int,
        block_ids: Sequence[Sequence[int]] | None,
        states: Sequence[tuple[int, int, int]],
    ) -> list[BlockMove]:
        """Return the blocks to save after a step that computes `tokens` more of a request, states last.

        `states` are (group, block, depth in tokens) of the states that the step leaves at ends of blocks.
        """
        request, tracked = self._requests.get(request_id), self._tracked.get(request_id)
        if not self._saves or request is None or tracked is None or not _is_plain(request):
            return []
        block = self._groups.block_tokens
        known = request.num_prompt_tokens if self._only_prompts else request.num_tokens
        end = min(request.num_computed_tokens + tokens, known) // block
        keys = self._keys(request, end)
        start = request.num_computed_tokens // block if tracked.saved is None else tracked.saved
        tracked.saved = max(start, end)
        moves = [
            BlockMove(number, keys[index], block_ids[number][index])
            for number, group in enumerate(self._groups.groups)
            if group.kind is not Kind.CHECKPOINT and block_ids is not None
            for index in range(start, end)
            if block_ids[number][index] != NO_BLOCK
        ]
        ends = [(group, block_id, depth // block) for group, block_id, depth in states if depth % block == 0]
        return moves + [
            BlockMove(group, keys[depth - 1], block_id)
            for group, block_id, depth in ends
            if start < depth <= end
        ]

    def take_counts(self) -> dict[str, int]:
        """Return how often the breaker of this side's own store has opened since the last call, by the name
        of the counter."""
        trips = self._store.stats().trips
        new, self._counted_trips = trips - self._counted_trips, trips
        return {"trips": new} if new else {}

    def compute(self, request_ids: Iterable[str]) -> None:
        """Load nothing more for these requests, because a load failed."""
        for request_id in request_ids:
            if request_id in self._tracked:
                self._tracked[request_id].has_failed = True

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended."""
        self._requests.pop(request_id, None)
        self._tracked.pop(request_id, None)

    def forget_all(self) -> None:
        """Save nothing more of the requests so far: what they compute from is not under new roots."""
        self._requests.clear()
        self._tracked.clear()

    def _track(self, request: Any) -> Tracked:
        self._requests[request.request_id] = request
        return self._tracked.setdefault(request.request_id, Tracked())

    def _keys(self, request: Any, end: int) -> list[PageKey]:
        """Return the keys of at least the first `end` blocks."""
        keys = self._tracked[request.request_id].keys
        if len(keys) < end:
            tokens = request.all_token_ids[: end * self._groups.block_tokens]
            extend_keys(keys, self._root_of(request.cache_salt or ""), tokens, self._groups.block_tokens)
        return keys


def _is_plain(request: Any) -> bool:
    """Return whether the KV of a request follows from its token ids and its salt."""
    foreign = request.lora_request or request.mm_features or request.resumable
    return not foreign and request.prompt_embeds is None


def moves_of_step(
    side: SchedulerSide,
    scheduled: Mapping[str, int],
    drafted: Mapping[str, Sequence[int]],
    block_state: Any,
) -> list[list[BlockMove]]:
    """Return what each request of a step saves. `drafted` tokens may be rejected, so they do not count."""
    saves = [
        side.saves_of(
            request_id,
            tokens - len(drafted.get(request_id, ())),
            block_state.get_block_ids(request_id),
            block_state.boundary_state_offloads.get(request_id, ()),
        )
        for request_id, tokens in scheduled.items()
    ]
    return [moves for moves in saves if moves]
