"""API keys: who may send requests, as which tenant, and how often. Only digests of keys are kept.

keys:
  - tenant: search          # several keys may share a tenant
    sha256: 5d41...         # of the key: `tidemill key search` makes one
    requests_per_minute: 600
    tokens_per_minute: 100000
    max_parallel_requests: 16
    max_stored_bytes: 10000000000
    max_queued_batch_requests: 100000
  - tenant: people
    sha256: 7c21...
    operator: true          # may read /cluster and send commands, too
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Protocol

import yaml
from pydantic import BaseModel, Field, ValidationError

from tidemill.cluster.edge.chat.request.validation import problems_of, request_error
from tidemill.cluster.edge.records.account import TenantLimits
from tidemill.cluster.quotas.edge_quotas import EdgeQuotas, LimitReached, OpenAnswer
from tidemill.cluster.quotas.rates import Counted, Rates
from tidemill.cluster.quotas.router_quotas import QuotaGrant, QuotaRequest
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.files import read_regular
from tidemill.kvstore.periodic import every
from tidemill.workers.messages import RequestError

FILE_BYTES_MAX = 1 << 20

LOOK_S = 2.0
"""The period in which the file of keys is looked at: a key that was taken out is valid for as long."""

log = logging.getLogger(__name__)

OPERATORS_PATHS = ("/cluster", "/reset_prefix_cache", "/flush_cache", "/server_info", "/get_server_info")
"""The paths for operators, with all below them."""


class ApiKey(BaseModel, strict=True, extra="forbid", frozen=True):
    """One key and its limits; None: as much as the fleet takes, or as TenantLimits has.

    All `requests_per_minute` may arrive together after a pause, and all `tokens_per_minute`, of
    prompts and answers, may be used together. At most `max_parallel_requests` are answered at a time.
    The tenant stores at most `max_stored_bytes`, and its batches that have not ended have at most
    `max_queued_batch_requests` lines: the most of all keys that set them.
    """

    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_parallel_requests: Annotated[int, Field(ge=1)] | None = None
    max_stored_bytes: Annotated[int, Field(ge=1)] | None = None
    max_queued_batch_requests: Annotated[int, Field(ge=1)] | None = None
    operator: bool = False


class _File(BaseModel, strict=True, extra="forbid"):
    keys: Annotated[list[ApiKey], Field(min_length=1)]


class SharedRates(Protocol):
    """Counts that all edges share."""

    async def count(self, name: str, per_minute: int, ahead_s: float) -> Counted | None:
        """Count a request of a name; see Rates. Return None when no counter answers."""
        ...

    async def ask(self, asked: QuotaRequest) -> QuotaGrant | None:
        """Count open answers and tokens; see Quotas. Return None when no counter answers."""
        ...


class ApiKeys:
    """The known keys. Without any, every client is admitted. With `shared` a limit is one over all edges, and
    this edge counts by itself only while no router answers."""

    def __init__(self, keys: Sequence[ApiKey] = (), clock_s: Callable[[], float] = lambda: 0.0) -> None:
        self._keys = {key.sha256: key for key in keys}
        self._clock_s = clock_s
        self._rates = Rates()  # by digest, as this edge knows them
        self._quotas = EdgeQuotas(clock_s, self._ask)
        self.shared: SharedRates | None = None

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Admit these keys from now on; those that stay keep what they have counted."""
        self._keys = {key.sha256: key for key in keys}

    @property
    def known(self) -> tuple[ApiKey, ...]:
        return tuple(self._keys.values())

    @property
    def are_needed(self) -> bool:
        return bool(self._keys)

    async def admit(self, path: str, headers: Mapping[str, str]) -> ApiKey | None:
        """Admit a request, count it and return its key. Raises RequestError (401, 403) and LimitReached."""
        if not self._keys:
            return None
        key = self._key_of(headers)
        if path.startswith(OPERATORS_PATHS):
            if not key.operator:
                raise RequestError(
                    f"{path} is for operators: ask with the key of one",
                    status=403,
                    code="not_an_operator",
                )
        elif key.requests_per_minute is not None:  # operators are not limited
            await self._count(key, key.requests_per_minute)
        return key

    def answering(
        self, key: ApiKey | None, num_tokens: int
    ) -> AbstractAsyncContextManager[OpenAnswer | None]:
        """Return the block of an answer with prompts of `num_tokens`; it raises LimitReached at its start."""
        if key is None or (key.max_parallel_requests is None and key.tokens_per_minute is None):
            return nullcontext()
        return self._quotas.answering(
            key.sha256, num_tokens, key.max_parallel_requests, key.tokens_per_minute
        )

    async def _ask(self, asked: QuotaRequest) -> QuotaGrant | None:
        return None if self.shared is None else await self.shared.ask(asked)

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return what a tenant, as Caller has it, may store and queue."""
        keys = [key for key in self._keys.values() if tenant == f"tenant:{key.tenant}"]
        usual = TenantLimits()
        stored = [key.max_stored_bytes for key in keys if key.max_stored_bytes is not None]
        queued = [key.max_queued_batch_requests for key in keys if key.max_queued_batch_requests is not None]
        return TenantLimits(
            stored_bytes=max(stored, default=usual.stored_bytes),
            queued_batch_requests=max(queued, default=usual.queued_batch_requests),
        )

    def tenant(self, headers: Mapping[str, str]) -> str | None:
        """Return the tenant; None where there are no keys. Raises RequestError."""
        return self._key_of(headers).tenant if self._keys else None

    def _key_of(self, headers: Mapping[str, str]) -> ApiKey:
        key = self._keys.get(digest_of(bearer(headers)))
        if key is None:
            raise RequestError(
                "this needs an API key that is known here: send it as `Authorization: Bearer KEY`",
                status=401,
                code="invalid_api_key",
            )
        return key

    async def _count(self, key: ApiKey, per_minute: int) -> None:
        """Count a request. Raises LimitReached."""
        ahead_s = self._rates.ahead_s(key.sha256, self._clock_s())
        counted: Counted | None = None
        if self.shared is not None:
            counted = await self.shared.count(key.sha256, per_minute, ahead_s)
        if counted is None:
            counted = self._rates.count(key.sha256, per_minute, self._clock_s())
        else:  # for the next router, if that one ends
            self._rates.note(key.sha256, self._clock_s(), counted.ahead_s)
        if counted.wait_s:
            message = f"tenant {key.tenant} asks more than {per_minute} times a minute"
            raise LimitReached(message, counted.wait_s, "requests", per_minute)


def bearer(headers: Mapping[str, str]) -> str:
    """Return the key of a request, also where clients of Anthropic send it; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def digest_of(key: str) -> str:
    """Return the digest. Keys are long and random, so one round reveals nothing of them."""
    return sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> list[ApiKey]:
    """Return the keys of a file. Raises TidemillError with the location and the fix."""
    try:
        content: object = yaml.safe_load(read_regular(path, FILE_BYTES_MAX).decode())
        keys = _File.model_validate(content).keys
    except OSError as error:
        raise TidemillError(f"--api-keys-file: {path} cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise TidemillError(f"--api-keys-file: {path}: {request_error(problems_of(error))}") from None
    except Exception as error:  # PyYAML also raises what int() and date() do
        raise TidemillError(f"--api-keys-file: {path} is no YAML: {' '.join(str(error).split())}") from error
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysFile:
    """A file of keys, and those that are valid beside it."""

    path: Path
    others: tuple[ApiKey, ...] = ()

    def read(self) -> tuple[ApiKey, ...]:
        """Return all keys. Raises TidemillError."""
        return (*self.others, *read_keys(self.path))

    def version(self) -> tuple[int, ...] | None:
        """Return what differs after a change, also of the target of a link; None without a file."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class KeysWatch:
    """Reads the file of keys again when it has changed."""

    def __init__(self, keys: ApiKeys, file: KeysFile) -> None:
        self._keys = keys
        self._file = file
        self._version: tuple[int, ...] | None = ()  # the file may have changed since it was read first
        self._warned: tuple[int, ...] | None = ()

    async def run(self) -> None:
        """Look until cancelled."""
        await every(LOOK_S, self.look, "API keys")

    async def look(self) -> None:
        """Admit the keys of the file if it has changed; keep the former ones if it cannot be used. The next
        look tries again what the system did not read."""
        version = self._file.version()
        if version == self._version:
            return
        try:
            keys = await asyncio.to_thread(self._file.read)
        except TidemillError as error:
            if version != self._warned:
                log.warning("%s: the keys from before stay valid", error)
            self._warned = version
            if isinstance(error.__cause__, OSError):
                return
        else:
            self._keys.replace(keys)
        self._version = version
