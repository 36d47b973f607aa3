"""The batch lane: runs the lines of batches as the requests of HTTP, behind all requests of clients."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from tidemill.cluster.edge.apis.batch_lines import ENDPOINTS, LineReader
from tidemill.cluster.edge.apis.json_bytes import json_bytes
from tidemill.cluster.edge.apis.reply import Outgoing, Reply, answer
from tidemill.cluster.edge.chat.request.hints import PRIORITY_MAX
from tidemill.cluster.edge.chat.request.validation import problems_of, request_error
from tidemill.cluster.edge.records.batches import LeaseLost, StoredBatch, StoredLine, TenantBatches, result_of
from tidemill.cluster.edge.records.store import Records, T
from tidemill.cluster.edge.requests.api_keys import ApiKey
from tidemill.cluster.edge.requests.caller import Caller
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.errors import error_of
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.periodic import every
from tidemill.workers.messages import Overloaded, Poisonous, RequestError, Unserved

log = logging.getLogger(__name__)

Prepare = Callable[[EdgeContext, EdgeModel, Any, Caller], Awaitable[Reply]]

BATCHES = 2
"""The batches that one edge runs at a time."""

LINES = 16
LINES_TOGETHER = 32
"""The lines that are answered at a time, of one batch and of all batches of all edges. They are a part of the
rows of one worker, because a request that finds no free row waits for the end of another one."""

SLICE_S = 30.0
"""The time for which a batch runs while a tenant without a running batch waits."""

LOOK_S = 1.0
RENEW_S = 3.0
RETRY_S = 1.0


class BatchLane:
    """Runs batches that no other edge runs."""

    def __init__(self, edge: EdgeContext, records: Records, apis: Mapping[str, Prepare]) -> None:
        self._edge = edge
        self._records = records
        self._apis = {path: prepare for path, prepare in apis.items() if path in ENDPOINTS}

    async def run(self) -> None:
        """Run batches until cancelled."""
        owners = [self._edge.sources.new_id() for _ in range(BATCHES)]
        await asyncio.gather(*(every(LOOK_S, partial(self._next, owner), "batches") for owner in owners))

    async def _next(self, owner: str) -> None:
        """Run a batch, if one waits, to its end or until the lease is lost."""
        if not await self._records.read("", TenantBatches, lambda found: found.waits()):
            return
        batch = await self._records.write("", TenantBatches, lambda found: found.claim(owner))
        if batch is not None:
            with suppress(LeaseLost):
                await _Run(self._edge, self._records, self._apis, batch, owner).run()


class _Run:
    def __init__(
        self,
        edge: EdgeContext,
        records: Records,
        apis: Mapping[str, Prepare],
        batch: StoredBatch,
        owner: str,
    ) -> None:
        self._edge = edge
        self._records = records
        self._batch = batch
        self._owner = owner
        self._prepare = apis[batch.body["endpoint"]]
        self._caller = Caller(tenant=batch.tenant, private=batch.tenant.startswith("tenant:"))
        self._key: ApiKey | None = None
        self._left = deque[int]()  # lines
        self._width = 1  # the lines that may be answered at a time
        self._slice_end_s = asyncio.get_running_loop().time() + SLICE_S
        self._yields = False

    async def run(self) -> None:
        """Raises LeaseLost, and Unserved when the database is gone."""
        status = self._end(await self._renewed(), is_done=False)
        working = asyncio.create_task(self._work() if status is None else asyncio.sleep(0))
        done = set[asyncio.Task[None]]()
        try:
            while status is None:
                done, _ = await asyncio.wait({working}, timeout=RENEW_S)
                status = self._end(await self._renewed(), is_done=bool(done))
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        if done:
            working.result()
        if status == "completed" and self._left:
            await self._do(lambda own: own.release(self._batch.id, self._owner))
        else:
            await self._do(lambda own: own.end(self._batch.id, self._owner, status))

    async def _renewed(self) -> dict[str, Any]:
        """Renew the lease, look at other batches, and return this one. Raises LeaseLost."""
        body, running, others_wait = await self._do(
            lambda own: (own.renew(self._batch.id, self._owner), own.num_running(), own.others_wait())
        )
        self._width = min(LINES, max(1, LINES_TOGETHER // running))
        self._yields |= others_wait and asyncio.get_running_loop().time() >= self._slice_end_s
        return body

    def _end(self, body: dict[str, Any], *, is_done: bool) -> str | None:
        """Return the status that the batch ends with now; None: it goes on."""
        if body["status"] == "cancelling":
            return "cancelled"
        if is_done:
            return "completed"
        return "expired" if self._edge.sources.unix_time_s() >= body["expires_at"] else None

    async def _work(self) -> None:
        """Answer lines without a result: all of them, or some and let others run."""
        if self._edge.keys.are_needed:
            known = {key.sha256: key for key in self._edge.keys.known}
            key = known.get(self._batch.key_digest)
            if key is not None:  # its lines take nothing from the limits of its other requests
                self._key = key.model_copy(update={"sha256": f"{key.sha256}/batches"})
            else:
                gone = {
                    "code": "invalid_api_key",
                    "message": "the key that made this batch is not known any more",
                }
                await self._fail([gone])
        if self._batch.body["status"] == "validating":
            await self._validate()
        self._left.extend(await self._do(lambda own: own.left(self._batch.id)))
        async with asyncio.TaskGroup() as group:
            for index in range(LINES):
                group.create_task(self._answer_some(index))

    async def _validate(self) -> None:
        """Read the lines of the input. Raises LeaseLost if they are wrong, which ends the batch."""
        name, reader = self._batch.id, LineReader(self._batch.body["endpoint"])
        await self._do(lambda own: own.clear(name, self._owner))
        try:
            file = await self._do(lambda own: own.files.file(self._batch.body["input_file_id"]))
            at: int | None = -1
            while at is not None:
                at, content = await self._do(lambda own, at=at: own.files.chunk(file, at)) or (None, b"")
                found = await asyncio.to_thread(_read, reader, content, is_last=at is None)
                await self._do(lambda own, found=found: own.add_lines(name, self._owner, found))
            if reader.errors or not reader.count:
                empty = {"code": "empty_file", "message": "the file has no lines"}
                await self._fail(reader.errors or [empty])
            await self._do(lambda own: own.begin(name, self._owner, reader.count))
        except RequestError as error:  # the file was deleted meanwhile, or there is no room
            await self._fail([{"code": error.code, "message": str(error)}])

    async def _fail(self, errors: Sequence[dict[str, Any]]) -> None:
        await self._do(lambda own: own.fail(self._batch.id, self._owner, errors))
        raise LeaseLost(self._batch.id)

    async def _answer_some(self, index: int) -> None:
        """Answer lines as one of LINES tasks, while it is one of those that may. The first one answers some
        line even if the batch yields from its start."""
        while self._left and not (self._yields and index):
            if index >= self._width:
                await asyncio.sleep(RETRY_S)
                continue
            number = self._left.popleft()
            custom_id, text = await self._do(lambda own, number=number: own.line(self._batch.id, number))
            request_id = f"{self._batch.id}_{number}"
            status, reply = await self._answered(json.loads(text), request_id)
            response = f'{{"status_code":{status},"request_id":"{request_id}","body":{reply}}}'
            result = result_of(self._batch.id, number, custom_id, response)
            await self._do(
                lambda own, number=number, result=result, is_error=status != 200: own.journal(
                    self._batch.id, self._owner, number, result, is_error=is_error
                )
            )
            if self._yields:
                return

    async def _answered(self, fields: dict[str, Any], request_id: str) -> tuple[int, str]:
        """Return the status and the reply of a line, as HTTP has them, when the fleet has room for it."""
        while True:
            (found,) = await asyncio.gather(self._reply(fields, request_id), return_exceptions=True)
            match found:
                case str():
                    return 200, found
                case Overloaded():
                    await asyncio.sleep(max(RETRY_S, found.retry_after_s))
                case Unserved() if not isinstance(found, Poisonous):
                    await asyncio.sleep(RETRY_S)
                case Exception():
                    if not isinstance(found, TidemillError):
                        log.error("%s", request_id, exc_info=found)
                    status, body = error_of(found)
                    return status, json_bytes(body).decode()
                case _:
                    raise found

    async def _reply(self, fields: dict[str, Any], request_id: str) -> str:
        """Return the reply to one line. Raises what HTTP reports."""
        await self._records.read(self._batch.tenant, TenantBatches, lambda own: own.account.check_room())
        kind = self._prepare.__annotations__["body"]
        if self._batch.body["endpoint"] == "/v1/responses":
            fields = {"store": False, **fields}
        try:
            body = kind.model_validate(fields)
        except ValidationError as error:
            raise request_error(problems_of(error)) from None
        reply = await self._prepare(self._edge, self._edge.models.find(body.model), body, self._caller)
        if reply.streams:
            raise RequestError("stream: the reply of a line is whole: leave it out", param="stream")
        last = tuple(replace(request, priority=PRIORITY_MAX) for request in reply.job.requests)
        reply = replace(reply, job=replace(reply.job, requests=last))
        whole: list[bytes] = []

        async def keep(message: bytes) -> None:
            whole.append(message)

        await answer(
            self._edge, reply, Outgoing(keep), request_id=request_id, client="batches", key=self._key
        )
        return whole[0].decode()

    async def _do(self, work: Callable[[TenantBatches], T]) -> T:
        return await self._records.write(self._batch.tenant, TenantBatches, work)


def _read(reader: LineReader, content: bytes, *, is_last: bool) -> list[StoredLine]:
    return list(reader.feed(content, is_last=is_last))
