"""Compiled placement: placement.cpp, which chooses what the definition in placement.py chooses, faster."""

from array import array
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router import placement as definition
from tidemill.cluster.router.cost_model import ROW_TOKENS, Vector
from tidemill.cluster.router.fleet_view import FETCHED_SHARE, RHO_TAU_S, Booking, Fleet, RequestBooked
from tidemill.cluster.router.prefix_table import Chain, Keys, Prefixes, Slots
from tidemill.kernels.shared.build import Library, build
from tidemill.kernels.shared.compiler import PLACEMENT
from tidemill.workers.scheduling.limits import ANSWER_TOKENS
from tidemill.workers.scheduling.prefill_throttle import LIGHT_STEPS

CONSTANTS = array(
    "d",
    (
        *(definition.GAP_PAGES_MAX, definition.GAP_TOKENS_MIN, definition.GAP_S_MAX, definition.HOME_SHARE),
        *(definition.HOP_S, definition.HOP_PAGES, definition.KAPPA, definition.PATIENCE_S),
        *(definition.FULL_S, definition.OVERFULL_S, definition.FILLED_MAX, definition.TOKENS_PER_S),
        *(definition.RHO_MAX, definition.TIED, RHO_TAU_S, ROW_TOKENS, FETCHED_SHARE, LIGHT_STEPS),
    ),
)
MADE = 11
"""The numbers of a placement: the slots of its decode and its prefill worker (-1: none), the predicted
seconds, the shared pages; of the prompt the tokens and seconds; its bytes and those of the stream; the time
at which the stream starts; and the slot and the pages of `elsewhere`."""


class Placed(NamedTuple):
    route: Route
    booked: list[RequestBooked]


class CompiledPlacement:
    """The compiled functions, for any number of fleets of one thread."""

    def __init__(self, library: Library) -> None:
        self.function = library.function
        self._place = library.function("place")
        self._made = array("d", bytes(8 * MADE))

    def new_fleet(self) -> Fleet:
        return Fleet(CompiledPrefixes(self))

    def place(
        self, fleet: Fleet, request: PlacementRequest, now_s: float, extra: Vector | None = None
    ) -> Placed | None:
        """Return what `place` and `bookings` of the definition return for a fleet of `new_fleet`."""
        prefixes = fleet.prefixes
        assert isinstance(prefixes, CompiledPrefixes)
        assert extra is None or (extra.dtype == np.float64 and extra.shape == fleet.table.shape[1:])
        members = fleet.members
        avoided = array("q", [members[worker].slot for worker in request.avoid if worker in members])
        answer_tokens = min(request.max_new_tokens, ANSWER_TOKENS)
        numbers = (now_s, request.num_tokens, answer_tokens, request.recompute_all, fleet.work_s(now_s))
        asked = array("d", (*numbers, len(avoided)))
        chain = fleet.chain(request.keys)
        made = self._made
        digest = blake2b(request.request_id.encode(), digest_size=8).digest()
        name = int.from_bytes(digest, "little", signed=True) or -1  # as `cut_keys`
        found = self._place(
            prefixes.address,
            fleet.table_address,
            fleet.table.shape[1],
            chain.address,
            len(request.keys),
            name,
            avoided.buffer_info()[0],
            asked.buffer_info()[0],
            CONSTANTS.buffer_info()[0],
            0 if extra is None else extra.ctypes.data,
            made.buffer_info()[0],
        )
        return _placed(fleet, request, now_s, made) if found else None


def _placed(fleet: Fleet, request: PlacementRequest, now_s: float, made: "array[float]") -> Placed:
    decode_slot, prefill_slot, predicted_s, shared, tokens, seconds, prompt_bytes, stream_bytes = made[:8]
    due_s, elsewhere_slot, elsewhere_pages = made[8:]
    decode = fleet.at(int(decode_slot)).info
    hop = None if prefill_slot < 0 else fleet.at(int(prefill_slot)).info
    route = definition.route_of(
        decode,
        hop,
        predicted_s,
        shared_pages=int(shared),
        elsewhere=fleet.at(int(elsewhere_slot)).info.worker if elsewhere_pages else None,
        elsewhere_pages=int(elsewhere_pages),
    )
    prompt = Booking(
        tokens=int(tokens),
        rows=1,
        at_s=now_s,
        due_s=now_s,
        seconds=seconds,
        num_bytes=int(prompt_bytes),
        keys=request.keys,
    )
    if hop is None:
        return Placed(route, [RequestBooked(decode.worker, prompt)])
    stream = Booking(
        tokens=decode.page_tokens,
        rows=1,
        at_s=now_s,
        due_s=due_s,
        num_bytes=int(stream_bytes),
        keys=request.keys,
    )
    return Placed(route, [RequestBooked(hop.worker, prompt), RequestBooked(decode.worker, stream)])


class CompiledPrefixes(Prefixes):
    """The same with its arrays in C++."""

    def __init__(self, compiled: CompiledPlacement) -> None:
        function = compiled.function
        make, self._free = function("prefixes_make"), function("prefixes_free")
        self.address = make()
        self._num_held, self._num_bytes = function("prefixes_num_held"), function("prefixes_num_bytes")
        self._depths, self._copy_held = function("prefixes_depths"), function("prefixes_held")
        self._add, self._remove = function("prefixes_add"), function("prefixes_remove")
        self._clear = function("prefixes_clear")

    def __del__(self) -> None:
        self._free(self.address)

    def num_held(self, slot: int) -> int:
        return self._num_held(self.address, slot) or 0

    @property
    def num_bytes(self) -> int:
        """The size of the arrays, without the holder sets."""
        return self._num_bytes(self.address) or 0

    def depths(self, chain: Chain, num_slots: int) -> Slots:
        found = np.zeros(num_slots, np.int32)
        self._depths(self.address, chain.address, len(chain.keys), found.ctypes.data, num_slots)
        return found

    def add(self, slot: int, keys: Keys, keys_max: int) -> None:
        keys = np.ascontiguousarray(keys)
        self._add(self.address, slot, keys.ctypes.data, len(keys), keys_max, 0)

    def add_chain(self, slot: int, chain: Chain, keys_max: int) -> None:
        self._add(self.address, slot, chain.address, len(chain.keys), keys_max, 1)

    def remove(self, slot: int, keys: Keys) -> None:
        keys = np.ascontiguousarray(keys)
        self._remove(self.address, slot, keys.ctypes.data, len(keys))

    def clear(self, slot: int) -> None:
        self._clear(self.address, slot)

    def held(self, slot: int) -> Keys:
        keys = np.zeros(self.num_held(slot), np.uint64)
        self._copy_held(self.address, slot, keys.ctypes.data, len(keys))
        return keys


def load(cache_folder: Path) -> CompiledPlacement:
    """Load the compiled placement, compiled into `cache_folder` at its first use. Raises
    KernelUnavailable."""
    return CompiledPlacement(build(cache_folder, program=PLACEMENT))
