"""Placements at the current router, many at a time.

A request has a call of its own if no other waits for a placement. The others go in frames, each of which
leaves when the one before it is answered, with all requests since then.
"""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import replace

from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.rpc.codec import Malformed
from tidemill.cluster.rpc.placement_codec import (
    decode_placement,
    decode_placements,
    encode_placement_request,
    encode_placement_requests,
)
from tidemill.cluster.rpc.router_failover import ANSWER_S_MAX, RouterLinks, unanswered
from tidemill.workers.messages import Overloaded, Poisonous, RequestError, Unserved, WorkerGone

Placement = Route | Overloaded | Poisonous | Unserved

FRAME_REQUESTS_MAX = 64
FRAME_KEYS_MAX = 1 << 19
"""The limits of a frame of placements: 4 MiB of keys, but at least one request."""


class Placements:
    def __init__(self, links: RouterLinks) -> None:
        self._links = links
        self._unsent = deque[tuple[PlacementRequest, asyncio.Future[Placement | None]]]()
        self._frames: asyncio.Task[None] | None = None
        self._num_own = 0  # requests with a call of their own

    async def place(self, request: PlacementRequest) -> Route:
        """Place a request. Wait up to `request.wait_s_max` for the router and for a worker. Raises Unserved,
        Overloaded, Poisonous."""
        now_s = asyncio.get_running_loop().time
        give_up_s = now_s() + request.wait_s_max

        def left_s() -> float:
            return max(0.0, give_up_s - now_s())

        def asking() -> bytes:
            return encode_placement_request(replace(request, wait_s_max=left_s()))

        placed: Placement | None = None
        if self._num_own or self._frames is not None:
            try:
                async with asyncio.timeout(request.wait_s_max + ANSWER_S_MAX):
                    placed = await self._place_in_frame(request)
            except TimeoutError:
                raise unanswered(request.wait_s_max, "it does not answer") from None
        if not isinstance(placed, Route | Overloaded | Poisonous):  # only a call of its own waits
            self._num_own += 1
            try:
                placed = decode_placement(await self._links.call("Place", asking, left_s()))
            finally:
                self._num_own -= 1
        if isinstance(placed, Route):
            return placed
        raise placed

    async def _place_in_frame(self, request: PlacementRequest) -> Placement | None:
        """Return the answer of the current router; None if it has none."""
        answer = asyncio.get_running_loop().create_future()
        self._unsent.append((request, answer))
        if self._frames is None:
            self._frames = asyncio.create_task(self._send_frames())
        return await answer

    async def _send_frames(self) -> None:
        """Send frames until all requests are answered."""
        try:
            while frame := self._next_frame():
                placed: list[Placement] | list[None] = [None] * len(frame)
                with suppress(WorkerGone, Unserved, RequestError, Malformed):
                    data = encode_placement_requests([request for request, _ in frame])
                    placed = decode_placements(await self._links.ask("PlaceAll", data))
                for (_, answer), each in zip(frame, placed, strict=True):
                    if not answer.done():
                        answer.set_result(each)
        finally:
            self._frames = None

    def _next_frame(self) -> list[tuple[PlacementRequest, "asyncio.Future[Placement | None]"]]:
        frame: list[tuple[PlacementRequest, asyncio.Future[Placement | None]]] = []
        num_keys = 0
        while self._unsent and len(frame) < FRAME_REQUESTS_MAX:
            request, answer = self._unsent[0]
            num_keys += len(request.keys)
            if frame and num_keys > FRAME_KEYS_MAX:
                break
            self._unsent.popleft()
            if not answer.done():  # its client has not left
                frame.append((request, answer))
        return frame

    def close(self) -> None:
        if self._frames is not None:
            self._frames.cancel()
