"""Who asks, and how long they wait for a first token: what the headers of a request say."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from tidemill.workers.messages import RequestError

DEADLINE_HEADER = "x-slo-ttft-ms"
"""As clients of llm-d and of the gateway API's inference extension send it: milliseconds."""

TENANT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """`tenant` names the API key without telling it; empty without one. `ttft_s_max` None: as long as the
    server lets them wait."""

    tenant: str = ""
    ttft_s_max: float | None = None

    def tenant_with(self, salt: str | None) -> str:
        """Without a key, whoever shares a cache salt is one tenant."""
        return self.tenant or (f"salt:{salt}" if salt else "")


def asker_of(headers: Mapping[str, str]) -> Asker:
    """`headers` by lower-case names. Raises RequestError."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    tenant = ""
    if scheme.lower() == "bearer" and key.strip():
        tenant = f"key:{blake2b(key.strip().encode(), digest_size=TENANT_BYTES).hexdigest()}"
    return Asker(tenant=tenant, ttft_s_max=_deadline_s(headers.get(DEADLINE_HEADER)))


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
