# pyrefly: ignore-errors[unexpected-keyword, unknown-attribute-access]
# pyrefly: ignore-errors[unknown-argument-type, unknown-variable-type]
# ruff: noqa: ANN401, ARG002 - names and types are those of vLLM, which is not installed here
"""`TidemillConnector`: a KV connector of vLLM (V1) over the page stores. Only this file imports vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "TidemillConnector",
        "kv_connector_module_path": "tidemill.connect.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"store": "file:///path"}}'

vLLM makes one connector in its scheduler and one in each worker. The scheduler sends a `Step` to the workers
with every step of the engine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from tidemill.connect.blocks import GroupMemory
from tidemill.connect.groups import BlockMove, Unsupported, groups_of
from tidemill.connect.scheduler_side import SchedulerSide, moves_of_step
from tidemill.connect.store_thread import StoreThread
from tidemill.connect.weights import fingerprint
from tidemill.connect.worker_side import WorkerSide
from tidemill.kvstore.keys import Namespace, PageKey

OPTIONS = ("store", "store_secret_file", "weights_id")
"""The options in `kv_connector_extra_config`."""

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "objects": ("Blocks and states that were loaded or saved, by outcome.", ("operation", "outcome")),
    "bytes": ("Bytes of blocks and states that arrived or were stored.", ("operation",)),
    "loads": ("Requests whose load ended: whole, or failed and computed.", ("outcome",)),
    "unsaved_blocks": ("Blocks that were not saved because the store is slow or down.", ()),
    "trips": ("How often the circuit breaker of the store opened.", ()),
}
"""The counters `vllm:tidemill_NAME_total`: the help and the labels of each."""


@dataclass
class Step(KVConnectorMetadata):
    """The blocks to load by request, and those to save after the step: a list for each request."""

    loads: dict[str, list[BlockMove]] = field(default_factory=dict[str, list[BlockMove]])
    saves: list[list[BlockMove]] = field(default_factory=list[list[BlockMove]])


@dataclass
class RankLayout(KVConnectorHandshakeMetadata):
    """The bytes of a block of each group on one rank, as text."""

    layout: str


@dataclass
class Counts(KVConnectorStats):
    """Counts since the last report, by the name of a counter and the values of its labels."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return self.data

    def is_empty(self) -> bool:
        return not self.data


class Metrics(KVConnectorPromMetrics):
    """The counters of `COUNTERS` in vLLM's own /metrics."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], values: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:tidemill_{name}", documentation=help_, labelnames=[*labelnames, *labels]
            )
            for name, (help_, labels) in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, count in transfer_stats_data.items():
            name, *labels = key.split()
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx], *labels).inc(count)


class TidemillConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads prefixes of prompts from a page store, and saves full blocks to it, beside vLLM's steps."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, model = self._kv_transfer_config, vllm_config.model_config
        options: dict[str, str] = transfer.kv_connector_extra_config
        check_options(options, transfer.kv_load_failure_policy)
        self._groups = groups_of(kv_cache_config, vllm_config, kind_of)
        self._store = StoreThread(options["store"], options.get("store_secret_file"))
        self._worker: WorkerSide | None = None
        self._layouts: list[str] = []  # of the groups, on this rank or, in the scheduler, on all of them
        self._missing_blocks: set[int] = set()
        self._epoch = ""
        self._weights = ""
        self._scheduler: SchedulerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._weights = options.get("weights_id") or fingerprint(model.model, model.revision)
            self._scheduler = SchedulerSide(
                self._groups,
                self._root,
                self._store,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                only_prompts=vllm_config.speculative_config is not None,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is lost is computed again

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        memories = [
            GroupMemory([kv_caches[name] for name in group.layer_names], self._kv_cache_config.num_blocks)
            for group in self._kv_cache_config.kv_cache_groups
        ]
        self._layouts = [memory.layout for memory in memories]
        self._worker = WorkerSide(self._groups, self._vllm_config.parallel_config.rank, self._store, memories)

    def get_handshake_metadata(self) -> RankLayout:
        return RankLayout(" ".join(self._layouts))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._step().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return, since a request runs only after its blocks have arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Return, since blocks are saved whole after the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._step().saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        loaded = self._worker.take_loaded()
        # vLLM takes the blocks of one group; of several it takes back the whole load.
        is_single = len(self._groups.groups) == 1
        self._missing_blocks = loaded.missing_blocks if is_single else set[int]()
        failed = set[str]() if is_single else loaded.failed
        return KVConnectorTransferResults(finished_recving=loaded.ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        missing, self._missing_blocks = self._missing_blocks, set[int]()
        return missing

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        side = self._worker or self._scheduler
        counts = {} if side is None else side.take_counts()
        return Counts(data=counts) if counts else None

    def shutdown(self) -> None:
        self._store.close()

    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step

    # In the scheduler.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        ranks = [metadata[rank] for rank in sorted(metadata)]
        self._layouts = [rank.layout for rank in ranks if isinstance(rank, RankLayout)]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        tokens = self._scheduler.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.admit(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        assert self._scheduler is not None
        output = scheduler_output
        moves = moves_of_step(
            self._scheduler,
            output.num_scheduled_tokens,
            output.scheduled_spec_decode_tokens,
            output.kv_connector_block_state,
        )
        return Step(self._scheduler.take_loads(), moves)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        output = connector_output
        self._scheduler.compute(output.failed_recving or ())
        if output.invalid_block_ids:  # those of the requests whose loads have ended
            self._scheduler.compute(output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        assert self._scheduler is not None
        self._scheduler.forget(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Sequence[list[int]]) -> tuple[bool, None]:
        return self.request_finished(request, ())

    def reset_cache(self) -> bool:
        """Read nothing that was saved until now: vLLM asks for it when weights have changed in place."""
        assert self._scheduler is not None
        self._epoch = uuid4().hex
        self._scheduler.forget_all()
        return True

    def _root(self, salt: str) -> PageKey:
        config = self._vllm_config
        model, parallel = config.model_config, config.parallel_config
        parts = (
            f"vllm {vllm.__version__}",
            f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size} ranks",
            f"{self._groups}",
            *self._layouts,
            f"{model.dtype} {model.quantization} {config.cache_config.cache_dtype}",
            f"{config.attention_config.backend} {self._store.sealing.describe()} {self._epoch}",
        )
        identity = f"{self._weights} {config_text(model.hf_config)}"
        return Namespace(model=identity, layout="\n".join(parts), salt=salt).root()

    # In vLLM's front end.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return Counts(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def check_options(options: Mapping[str, object], policy: str) -> None:
    """Raise Unsupported for settings with which requests would fail, or which mean nothing."""
    if policy != "recompute":
        raise Unsupported(
            f'a load that fails would end its request: add "kv_load_failure_policy": "recompute" to '
            f"--kv-transfer-config, which has {policy!r}"
        )
    if unknown := sorted({*options} - {*OPTIONS}):
        raise Unsupported(f"kv_connector_extra_config has {', '.join(OPTIONS)}, not {', '.join(unknown)}")
    if not options.get("store"):
        fix = '"kv_connector_extra_config": {"store": "file:///path"}'
        raise Unsupported(f"no store is named: add {fix} to --kv-transfer-config")


def kind_of(spec: Any) -> str:
    """Return the name of the kind of a KVCacheSpec."""
    return get_kv_cache_spec_kind(spec).value


def config_text(config: Any) -> str:
    """Return all that a model's configuration sets, as text."""
    fields = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    return json.dumps(fields, sort_keys=True, default=str)
