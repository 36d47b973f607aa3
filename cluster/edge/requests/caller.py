"""Who asks, and how long they wait for a first token: what the headers of a request say."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from tidemill.cluster.edge.requests.api_keys import ApiKeys, bearer
from tidemill.cluster.observability.spans import parent_of
from tidemill.workers.messages import RequestError

DEADLINE_HEADER = "x-slo-ttft-ms"
"""As clients of llm-d and of the gateway API's inference extension send it: milliseconds."""

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_CHARS_MAX = 128

TENANT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`tenant` is the key's, or names the key without telling it; empty without one. A `private` one shares
    no prefix with others. `ttft_s_max` None: as long as the server lets them wait."""

    tenant: str = ""
    private: bool = False
    ttft_s_max: float | None = None
    trace_parent: str = ""  # of the client's span, empty without one

    def tenant_with(self, salt: str | None) -> str:
        """Without a key, whoever shares a cache salt is one tenant."""
        return self.tenant or (f"salt:{salt}" if salt else "")

    def salt_with(self, salt: str | None) -> str:
        """What the names of the pages depend on besides tokens: nobody reads or times another's."""
        return f"{self.tenant}/{salt or ''}" if self.private else salt or ""


def caller_of(headers: Mapping[str, str], keys: ApiKeys) -> Caller:
    """`headers` by lower-case names. Raises RequestError."""
    deadline_s = _deadline_s(headers.get(DEADLINE_HEADER))
    trace_parent = parent_of(headers.get("traceparent"))
    tenant = keys.tenant(headers)
    if tenant is not None:
        return Caller(
            tenant=f"tenant:{tenant}", private=True, ttft_s_max=deadline_s, trace_parent=trace_parent
        )
    key = bearer(headers)
    if key:
        tenant = f"key:{blake2b(key.encode(), digest_size=TENANT_BYTES).hexdigest()}"
    return Caller(tenant=tenant or "", ttft_s_max=deadline_s, trace_parent=trace_parent)


def _deadline_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        deadline_ms = float(text)
    except ValueError:
        deadline_ms = math.nan
    if not (deadline_ms > 0 and math.isfinite(deadline_ms)):
        raise RequestError(
            f"{DEADLINE_HEADER}: {text[:32]!r} is no time: "
            "give the milliseconds that the first token may take, like 2000",
            param=DEADLINE_HEADER,
        )
    return deadline_ms / 1000


def request_id_of(given: str | None) -> str | None:
    """The client's own id when it can be sent back as it is."""
    if given and len(given) <= REQUEST_ID_CHARS_MAX and given.isascii() and given.isprintable():
        return given
    return None
