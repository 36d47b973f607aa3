# ruff: noqa: ANN401 - types of vLLM
"""The connector over the few classes of vLLM that it uses: checks at the start, roles, counters."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter

from tidemill.connect.groups import Unsupported

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
MODULE = "tidemill.connect.vllm"
BLOCK_TOKENS = 4


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """vLLM's KVConnectorBase_V1, as far as it does something."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self.metadata: object = None

    def _get_connector_metadata(self) -> object:
        return self.metadata


@dataclass
class Stats:
    data: dict[str, Any] = field(default_factory=dict[str, Any])


class PromMetrics:
    def __init__(self, vllm_config: object, metric_types: Any, labelnames: list[str], values: Any) -> None:
        del vllm_config, labelnames
        self._counter_cls = metric_types[Counter]
        self.per_engine_labelvalues = values


@dataclass
class Results:
    finished_sending: set[str] = field(default_factory=set[str])
    finished_recving: set[str] = field(default_factory=set[str])
    failed_recving: set[str] = field(default_factory=set[str])


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """Import the connector beside a fake vLLM, which is gone afterwards."""
    empty = {
        name: type(name, (), {})
        for name in ("KVConnectorMetadata", "KVConnectorHandshakeMetadata", "SupportsHMA")
    }
    fakes = {
        "vllm": {"__version__": "0.32.0"},
        f"{V1}.base": {
            **empty,
            "KVConnectorBase_V1": Base,
            "KVConnectorRole": Role,
            "KVConnectorTransferResults": Results,
        },
        f"{V1}.metrics": {"KVConnectorPromMetrics": PromMetrics, "KVConnectorStats": Stats},
        "vllm.v1.kv_cache_interface": {"get_kv_cache_spec_kind": lambda spec: spec.kind},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in fakes.items():
            fake = ModuleType(name)
            vars(fake).update(contents)
            patch.setitem(sys.modules, name, fake)
        yield import_module(MODULE)
    sys.modules.pop(MODULE, None)


class Config(dict[str, Any]):
    """A configuration of Hugging Face."""

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


def spec(kind: str) -> SimpleNamespace:
    return SimpleNamespace(kind=SimpleNamespace(value=kind), block_size=BLOCK_TOKENS)


def cache_config(*kinds: str) -> SimpleNamespace:
    groups = [
        SimpleNamespace(
            kv_cache_spec=spec(kind), is_eagle_group=False, layer_names=[f"{kind}.0", f"{kind}.1"]
        )
        for kind in kinds
    ]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=6)


@pytest.fixture
def vllm_config(tmp_path: Path) -> SimpleNamespace:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"store": f"file://{tmp_path}/store?size=64MiB"},
            kv_load_failure_policy="recompute",
            is_kv_consumer=True,
            is_kv_producer=True,
        ),
        model_config=SimpleNamespace(
            model=str(tmp_path / "model"),
            revision=None,
            dtype="bfloat16",
            quantization=None,
            hf_config=Config(_name_or_path=str(tmp_path), layers=2),
        ),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(mamba_cache_mode="align", cache_dtype="auto"),
        attention_config=SimpleNamespace(backend=None),
        speculative_config=None,
    )


def test_it_does_not_start_where_failed_loads_end_requests(module: Any, vllm_config: Any) -> None:
    vllm_config.kv_transfer_config.kv_load_failure_policy = "fail"
    with pytest.raises(Unsupported, match='"kv_load_failure_policy": "recompute" to --kv-transfer-config'):
        module.TidemillConnector(vllm_config, Role.SCHEDULER, cache_config("full_attention"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, '"store": "file:///path"'), ({"store": "/s", "stores": "/t"}, "has store, .*, not stores")],
)
def test_options_are_checked_at_the_start(
    module: Any,
    vllm_config: Any,
    options: dict[str, str],
    reason: str,
) -> None:
    vllm_config.kv_transfer_config.kv_connector_extra_config = options
    with pytest.raises(Unsupported, match=reason):
        module.TidemillConnector(vllm_config, Role.WORKER, cache_config("full_attention"))


@pytest.mark.parametrize(
    ("kinds", "missing"), [(("full_attention",), {2}), (("full_attention", "mamba"), set[int]())]
)
def test_a_failed_load_is_reported_as_vllm_takes_it(
    module: Any,
    vllm_config: Any,
    kinds: tuple[str, ...],
    missing: set[int],
) -> None:
    """vLLM takes blocks of one group, and of several whole requests."""
    worker = module.TidemillConnector(vllm_config, Role.WORKER, cache_config(*kinds))
    names = [name for group in cache_config(*kinds).kv_cache_groups for name in group.layer_names]
    worker.register_kv_caches({name: torch.zeros(6, 2, BLOCK_TOKENS, 8) for name in names})
    worker.metadata = module.Step({"one": [module.BlockMove(0, bytes(16), 2)]})
    worker.start_load_kv(None)
    while not (results := worker.get_transfer_results(set())).finished_recving:
        pass
    assert worker.get_block_ids_with_load_errors() == missing
    assert results.failed_recving == (set() if missing else {"one"})
    assert worker.get_block_ids_with_load_errors() == set()
    worker.shutdown()


def test_keys_follow_from_weights_configuration_layout_and_epoch(
    module: Any,
    vllm_config: Any,
    tmp_path: Path,
) -> None:
    def root(layout: str = "as it is", *, reset: bool = False) -> bytes:
        scheduler = module.TidemillConnector(vllm_config, Role.SCHEDULER, cache_config("full_attention"))
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): module.RankLayout(layout)})
        if reset:
            assert scheduler.reset_cache()
        scheduler.shutdown()
        return scheduler._root("salt")

    roots = [root()]
    vllm_config.model_config.hf_config["_name_or_path"] = "elsewhere"
    assert root() == roots[0]
    roots += [root("another layout"), root(reset=True), root(reset=True)]
    vllm_config.model_config.hf_config["layers"] = 3
    roots.append(root())
    (tmp_path / "model/model.safetensors").write_bytes(b"Weights")
    roots.append(root())
    assert len(set(roots)) == len(roots)


def test_weights_that_are_nowhere_need_a_name(module: Any, vllm_config: Any) -> None:
    vllm_config.model_config.model = "no-such/model"
    with pytest.raises(Unsupported, match="weights_id"):
        module.TidemillConnector(vllm_config, Role.SCHEDULER, cache_config("full_attention"))
    vllm_config.kv_transfer_config.kv_connector_extra_config["weights_id"] = "release 7"
    module.TidemillConnector(vllm_config, Role.SCHEDULER, cache_config("full_attention")).shutdown()


def test_counts_become_counters_of_vllm(module: Any) -> None:
    registry = CollectorRegistry()

    def counter(**fields: Any) -> Counter:
        return Counter(**fields, registry=registry)

    metrics = module.TidemillConnector.build_prom_metrics(None, {Counter: counter}, ["engine"], {1: ["1"]})
    counts = module.TidemillConnector.build_kv_connector_stats(
        json.loads('{"objects load hit": 2, "trips": 1}')
    )
    counts.aggregate(module.Counts(data={"objects load hit": 3}))
    metrics.observe(counts.reduce(), 1)
    labels = {"engine": "1", "operation": "load", "outcome": "hit"}
    assert registry.get_sample_value("vllm:tidemill_objects_total", labels) == 5
    assert registry.get_sample_value("vllm:tidemill_trips_total", {"engine": "1"}) == 1
