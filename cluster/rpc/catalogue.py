"""The catalogue: all that an edge must know of a cluster to serve it. It has no key in clear."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.cluster.observability.telemetry import QUIET, Telemetry
from tidemill.cluster.settings import AUTO, ChatSettings
from tidemill.workers.messages import EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One model and the addresses of its routers.

    `info` has the facts that all its workers share, and the least `max_model_len` of them. `files`
    are the SHA-256 digests of the files of its tokenizer, by their names below the model's folder.
    The template in `chat` is a text. `memory_router` is the address of the router that assigns its
    budgets, if that belongs to another model.
    """

    names: tuple[str, ...]
    info: EngineInfo
    created_s: int  # unix time
    routers: tuple[str, ...]
    files: Mapping[str, str]
    chat: ChatSettings = AUTO
    memory_router: str | None = None
    ttft_s_max: float
    prefix_caching: bool = True
    cold_start_s_max: float | None = None  # see ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueKey:
    """The digest of an API key, and what its tenant may do; see ApiKey."""

    tenant: str
    sha256: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel_requests: int | None = None
    max_stored_bytes: int | None = None
    max_queued_batch_requests: int | None = None
    operator: bool = False


Limit = bool | int | float | str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The models, keys and limits of a cluster. Without `keys`, edges admit every client. `limits` are the
    fields of EdgeLimits, and `resets` counts the resets of the prefix cache by model."""

    models: tuple[CatalogueModel, ...]
    keys: tuple[CatalogueKey, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict[str, Limit])
    telemetry: Telemetry = QUIET
    resets: Mapping[str, int] = field(default_factory=dict[str, int])
