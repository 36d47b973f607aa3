"""The caller of a request and its deadline, from the headers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from tidemill.cluster.edge.chat.request.params import session_of
from tidemill.cluster.edge.requests.api_keys import ApiKeys, bearer
from tidemill.cluster.observability.spans import parent_of
from tidemill.workers.messages import RequestError

DEADLINE_HEADER = "x-slo-ttft-ms"
"""The header that clients of llm-d and of the gateway API's inference extension send: milliseconds."""

DIAGNOSTICS_HEADER = "x-cache-diagnostics"
"""The header that asks why tokens of the prompt were computed: `on`, or `text` for its own text as well."""

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_CHARS_MAX = 128

SESSION_HEADERS = ("x-session-id", "session-id", "x-claude-code-session-id")
SESSION_CHARS_MAX = 256
"""The headers with which agents name a conversation, the first one first, and the longest such name."""

TENANT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`tenant` is the key's, or a digest of the key; empty without one. A `private` caller shares no prefix
    with others. `ttft_s_max` None: the server's limit. `diagnostics` is that of DIAGNOSTICS_HEADER. A
    `session` in the body precedes that of headers."""

    tenant: str = ""
    private: bool = False
    ttft_s_max: float | None = None
    trace_parent: str = ""  # of the client's span, empty without one
    diagnostics: Literal["", "on", "text"] = ""
    session: str = ""  # its name, empty without one

    def tenant_with(self, salt: str | None) -> str:
        """Return the tenant; without a key, clients with one cache salt are one tenant."""
        return self.tenant or (f"salt:{salt}" if salt else "")

    def session_with(self, tenant: str) -> str:
        """Return the digest of the session and its tenant; empty without a session."""
        return session_of(tenant, "session", self.session) if self.session else ""

    def salt_with(self, salt: str | None) -> str:
        """Return the salt of page keys, so that no tenant reads or times another's pages."""
        return f"{self.tenant}/{salt or ''}" if self.private else salt or ""


def caller_of(headers: Mapping[str, str], keys: ApiKeys) -> Caller:
    """Return the caller; `headers` by lower-case names, of which the first of a name counts. Raises
    RequestError."""
    headers = dict([*headers.items()][::-1])  # starlette's are searched for each name
    tenant, key = keys.tenant(headers), bearer(headers)
    if tenant is not None:
        name = f"tenant:{tenant}"
    else:
        name = f"key:{blake2b(key.encode(), digest_size=TENANT_BYTES).hexdigest()}" if key else ""
    return Caller(
        tenant=name,
        private=tenant is not None,
        ttft_s_max=_deadline_s(headers.get(DEADLINE_HEADER)),
        trace_parent=parent_of(headers.get("traceparent")),
        session=_session(headers),
        diagnostics=_diagnostics(headers.get(DIAGNOSTICS_HEADER, "")),
    )


def _diagnostics(text: str) -> Literal["", "on", "text"]:
    match text.lower():
        case "" | "on" | "text" as asked:
            return asked
        case _:
            raise RequestError(
                f"{DIAGNOSTICS_HEADER}: {text[:32]!r} is none of on and text", param=DIAGNOSTICS_HEADER
            )


def _session(headers: Mapping[str, str]) -> str:
    """Return the name of the conversation; a name that is too long counts as absent."""
    names = (headers.get(header, "") for header in SESSION_HEADERS)
    return next((name for name in names if 0 < len(name) <= SESSION_CHARS_MAX), "")


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
    """Return the client's own id if it can be sent back unchanged."""
    if given and len(given) <= REQUEST_ID_CHARS_MAX and given.isascii() and given.isprintable():
        return given
    return None
