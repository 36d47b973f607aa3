"""/v1/files and /v1/batches: files that are uploaded, and many requests in one of them."""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated

from fastapi import FastAPI, Query, Request
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from tidemill.cluster.edge.apis.batch_lines import ENDPOINTS
from tidemill.cluster.edge.apis.responses_body import ID, Metadata
from tidemill.cluster.edge.apis.responses_body import Id as BodyId
from tidemill.cluster.edge.apis.responses_storage import needed
from tidemill.cluster.edge.http.multipart import MultipartReader, Part
from tidemill.cluster.edge.http.records import LISTED, After, Id, Limit, Order, listed
from tidemill.cluster.edge.http.stream import CLIENT_CLOSED_REQUEST
from tidemill.cluster.edge.records.batches import StoredBatch, TenantBatches
from tidemill.cluster.edge.records.files import StoredFile, TenantFiles
from tidemill.cluster.edge.records.store import Records
from tidemill.cluster.edge.requests.caller import caller_of
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.limits import BODY_BYTES_PER_S
from tidemill.cluster.edge.requests.usage import Json
from tidemill.workers.messages import RequestError

FILE_BYTES_MAX = 200 << 20
PART_BYTES = 1 << 20
FIELD_BYTES_MAX = 1024
FILES_LISTED_MAX = 10_000
PURPOSES = ("batch", "user_data")
SECONDS = {"m": 60, "h": 3600, "d": 86_400}
WINDOW = r"^[1-9][0-9]{0,3}[mhd]$"
WINDOW_S_MAX = 7 * 86_400


class BatchBody(BaseModel, strict=True, extra="ignore"):
    """The body of POST /v1/batches."""

    input_file_id: BodyId
    endpoint: str
    completion_window: Annotated[str, Field(pattern=WINDOW)]
    metadata: Metadata | None = None


def add_batch_routes(app: FastAPI, context: EdgeContext, apis: Mapping[str, object]) -> None:
    stored = StoredBatches(context, [path for path in ENDPOINTS if path in apis])
    app.add_api_route("/v1/files", stored.upload, methods=["POST"])
    app.add_api_route("/v1/files", stored.files)
    app.add_api_route("/v1/files/{name}", stored.file)
    app.add_api_route("/v1/files/{name}", stored.delete, methods=["DELETE"])
    app.add_api_route("/v1/files/{name}/content", stored.content)
    app.add_api_route("/v1/batches", stored.create, methods=["POST"])
    app.add_api_route("/v1/batches", stored.batches)
    app.add_api_route("/v1/batches/{name}", stored.batch)
    app.add_api_route("/v1/batches/{name}/cancel", stored.cancel, methods=["POST"])


class StoredBatches:
    """The endpoints. Each sees the records of its caller alone."""

    def __init__(self, context: EdgeContext, endpoints: list[str]) -> None:
        self._context = context
        self._endpoints = endpoints

    async def upload(self, request: Request) -> Json:
        """Store a file, of a form with `purpose` and `file`."""
        records, tenant = self._records(request)
        num_announced = int(request.headers.get("content-length", "0"))
        if num_announced > FILE_BYTES_MAX + PART_BYTES:
            raise _too_long()
        name = f"file-{self._context.sources.new_id()}"
        await records.write(tenant, TenantFiles, lambda own: own.begin(name, num_announced))
        try:
            fields, num_bytes = await self._received(request, records, tenant, name)
            if fields.get("purpose") not in PURPOSES:
                raise RequestError(f"purpose is one of {', '.join(PURPOSES)}", param="purpose")
            now_s = int(self._context.sources.unix_time_s())

            def finish(own: TenantFiles) -> StoredFile:
                expires_s = own.account.expires_s
                if seconds := fields.get("expires_after[seconds]", ""):
                    if not seconds.isdecimal() or not 3600 <= int(seconds) <= 2_592_000:
                        raise RequestError("seconds are 3600 to 2592000", param="expires_after[seconds]")
                    expires_s = now_s + int(seconds)
                file = StoredFile(name, fields["file"], fields["purpose"], now_s, expires_s, num_bytes)
                own.finish(file)
                return file

            return _shown(await records.write(tenant, TenantFiles, finish))
        except BaseException:
            await records.write(tenant, TenantFiles, lambda own: own.drop(name))
            raise

    async def _received(
        self, request: Request, records: Records, tenant: str, name: str
    ) -> tuple[dict[str, str], int]:
        """Store the parts of a file; return the other fields of the form, with the file's name, and its
        length. Raises RequestError."""
        reader = MultipartReader(request.headers.get("content-type", ""))
        fields: dict[str, str] = {}
        begun: Part | None = None
        content, num_bytes, number = bytearray(), 0, 0
        async for piece in self._pieces(request):
            for part, data in reader.feed(piece):
                if part is not begun and part.name in fields:
                    raise RequestError(f"the form has {part.name[:64]!r} twice: send it once", param="file")
                begun = part
                if part.name != "file":
                    fields[part.name] = fields.get(part.name, "") + data.decode(errors="replace")
                    if len(fields) > 16 or len(fields[part.name]) > FIELD_BYTES_MAX:
                        raise RequestError("a field of the form is too long", param="purpose")
                    continue
                fields["file"] = _name_of(part)
                content += data
                num_bytes += len(data)
                if num_bytes > FILE_BYTES_MAX:
                    raise _too_long()
            while len(content) >= PART_BYTES:
                body = bytes(content[:PART_BYTES])
                del content[:PART_BYTES]
                await records.write(
                    tenant, TenantFiles, lambda own, at=number, body=body: own.add_part(name, at, body)
                )
                number += 1
        if not reader.has_ended or "file" not in fields:
            raise RequestError("the form has no whole part `file`", param="file")
        await records.write(tenant, TenantFiles, lambda own: own.add_part(name, number, bytes(content)))
        return fields, num_bytes

    async def _pieces(self, request: Request) -> AsyncGenerator[bytes]:
        """Yield the pieces of a body that is neither too slow nor too long. Raises RequestError."""
        time_s = asyncio.get_running_loop().time
        s_max = self._context.limits.body_s_max
        began_s, num_bytes = time_s(), 0
        stream = aiter(request.stream())
        while True:
            try:
                async with asyncio.timeout_at(
                    min(time_s() + s_max, began_s + s_max + num_bytes / BODY_BYTES_PER_S)
                ):
                    piece = await anext(stream, None)
            except TimeoutError as error:
                raise RequestError("the body came too slowly", status=408, code="body_too_slow") from error
            except ClientDisconnect as error:
                raise RequestError("the client has gone", status=CLIENT_CLOSED_REQUEST) from error
            if piece is None:
                return
            num_bytes += len(piece)
            if num_bytes > FILE_BYTES_MAX + PART_BYTES:
                raise _too_long()
            yield piece

    async def files(
        self,
        request: Request,
        purpose: Annotated[str | None, Query(pattern=ID.pattern)] = None,
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=FILES_LISTED_MAX)] = FILES_LISTED_MAX,
        order: Order = "desc",
    ) -> Json:
        """List the files; the newest first."""
        records, tenant = self._records(request)
        is_up = order == "asc"
        found = await records.read(
            tenant, TenantFiles, lambda own: own.listed(purpose, after, limit + 1, ascending=is_up)
        )
        return listed([_shown(file) for file in found[:limit]], has_more=len(found) > limit)

    async def file(self, name: Id, request: Request) -> Json:
        """Return a file, without its content."""
        records, tenant = self._records(request)
        return _shown(await records.read(tenant, TenantFiles, lambda own: own.file(name)))

    async def delete(self, name: Id, request: Request) -> Json:
        """Delete a file."""
        records, tenant = self._records(request)
        await records.write(tenant, TenantFiles, lambda own: own.delete(name))
        return {"id": name, "object": "file", "deleted": True}

    async def content(self, name: Id, request: Request) -> Response:
        """Return the content of a file."""
        records, tenant = self._records(request)
        file = await records.read(tenant, TenantFiles, lambda own: own.file(name))

        async def pieces() -> AsyncGenerator[bytes]:
            piece: tuple[int, bytes] | None = (-1, b"")
            while piece is not None:
                yield piece[1]
                at = piece[0]
                piece = await records.read(tenant, TenantFiles, lambda own, at=at: own.chunk(file, at))

        length = {"content-length": str(file.num_bytes)}
        return StreamingResponse(pieces(), headers=length, media_type="application/octet-stream")

    async def create(self, request: Request, body: BatchBody) -> Json:
        """Start a batch: the lines of a file are answered behind all other requests."""
        records, tenant = self._records(request)
        if body.endpoint not in self._endpoints:
            raise RequestError(f"endpoint is one of {', '.join(self._endpoints)}", param="endpoint")
        window_s = int(body.completion_window[:-1]) * SECONDS[body.completion_window[-1]]
        if window_s > WINDOW_S_MAX:
            raise RequestError("completion_window is at most 7d", param="completion_window")
        name = f"batch_{self._context.sources.new_id()}"
        now_s = int(self._context.sources.unix_time_s())
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        shown: Json = {
            "id": name,
            "object": "batch",
            **body.model_dump(),
            "status": "validating",
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now_s,
            "expires_at": now_s + window_s,
            **{f"{time}_at": None for time in times},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }
        key = request.state.key
        digest = "" if key is None else key.sha256

        def create(own: TenantBatches) -> None:
            own.files.input_of_batch(body.input_file_id, now_s + window_s)
            own.create(StoredBatch(name, tenant, digest, shown))

        await records.write(tenant, TenantBatches, create)
        return shown

    async def batches(self, request: Request, after: After = None, limit: Limit = LISTED) -> Json:
        """List the batches; the newest first."""
        records, tenant = self._records(request)
        found = await records.read(tenant, TenantBatches, lambda own: own.listed(after, limit + 1))
        return listed(found[:limit], has_more=len(found) > limit)

    async def batch(self, name: Id, request: Request) -> Json:
        """Return a batch."""
        records, tenant = self._records(request)
        return await records.read(tenant, TenantBatches, lambda own: own.batch(name))

    async def cancel(self, name: Id, request: Request) -> Json:
        """Cancel a batch; the lines with an answer are in its files."""
        records, tenant = self._records(request)
        return await records.write(tenant, TenantBatches, lambda own: own.cancel(name))

    def _records(self, request: Request) -> tuple[Records, str]:
        return needed(self._context.records), caller_of(request.headers, self._context.keys).tenant


def _too_long() -> RequestError:
    message = f"a file has at most {FILE_BYTES_MAX >> 20} MiB: send several"
    return RequestError(message, status=413, param="file", code="body_too_large")


def _name_of(part: Part) -> str:
    """Return the name of a file without what Postgres refuses or terminals obey."""
    return re.sub(r"[^\w .()-]", "_", part.filename or "file")[:256]


def _shown(file: StoredFile) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_s,
        "expires_at": file.expires_s,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
