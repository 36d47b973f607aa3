"""A configuration is translated into the settings of its cluster; threads follow the cores of the machine."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from tests.support.cluster.configs import TREES, Tree
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.config import local_problems
from tidemill.cluster.cli.serve import config_of_options
from tidemill.cluster.config.flags import with_config_paths
from tidemill.cluster.config.fleets import (
    Surroundings,
    cluster_settings,
    summary,
    telemetry_of,
    with_visible_gpus,
)
from tidemill.cluster.config.problems import ConfigError
from tidemill.cluster.config.reading import parse_config
from tidemill.cluster.config.threads import SMALL_BYTES, arrangement, count_cores
from tidemill.cluster.config.tree import RootConfig
from tidemill.cluster.messages import Bounds
from tidemill.cluster.observability.telemetry import Telemetry
from tidemill.cluster.settings import ChatSettings, ClusterSettings, FleetSettings, WorkerSettings
from tidemill.workers.settings import EngineSettings, SettingsError
from tidemill.workers.sources.names import bundled
from tidemill.workers.vllm.settings import VllmSettings

SURROUNDINGS = Surroundings(store_url="memory:", cache_folder=Path("cache"))
MIB = 1 << 20


def settings(text: str) -> ClusterSettings:
    return cluster_settings(parse_config(text, "c.yaml"), SURROUNDINGS)


def fleet(groups: str, more: str = "") -> FleetSettings:
    (fleet,) = settings(f"models: [{{model: keeper, groups: [{groups}]{more}}}]").fleets
    return fleet


def engine_of(worker: WorkerSettings) -> EngineSettings:
    """Return the settings of our engine, which a configuration makes."""
    assert isinstance(worker.engine, EngineSettings)
    return worker.engine


def test_kv_events_have_a_rank_for_each_worker() -> None:
    """However many workers of each role there will be, no two of them share a port."""
    models = "models: [{model: keeper, groups: [{role: prefill}, {role: decode}]}, {model: x}]"
    keys = "enable_kv_cache_events: true, replay_endpoint: 'tcp://*:6000', hwm: 7"
    enabled = f"telemetry: {{kv_events: {{{keys}}}}}"
    cluster = settings(f"{models}\n{enabled}")
    events = {worker.name: worker.engine.kv_events for worker in cluster.workers}
    ranks = [
        found.of_worker(f"{name[:-1]}{index}").rank
        for name, found in events.items()
        if found is not None
        for index in range(3)
    ]
    assert ranks == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    first = next(iter(events.values()))
    assert first is not None
    assert (first.endpoint, first.replay_endpoint, first.hwm) == ("tcp://127.0.0.1:5557", "tcp://*:6000", 7)
    for off in ("", enabled.replace("hwm: 7", "publisher: 'null'"), enabled.replace("true", "false")):
        workers = settings(f"{models}\n{off}").workers
        assert [worker.engine.kv_events for worker in workers] == [None] * 3


def test_each_model_has_its_own_fleet() -> None:
    text = """
        models:
        - {model: keeper, served_model_name: [Org/Large, large], ttft_max: 5, routers: 2, groups: [
            {role: prefill}, {role: decode, replicas: 2}]}
        - {model: /models/small, served_model_name: small, groups: [{role: mixed, memory: 16MiB}]}
        cluster: {ray_address: auto, namespace: blue}
    """
    cluster = settings(text)
    large, small = cluster.fleets
    assert (cluster.ray_address, cluster.namespace) == ("auto", "blue")
    assert (large.names, small.names) == (("Org/Large", "large"), ("small",))
    names = ["org-large-prefill-0", "org-large-decode-0", "org-large-decode-1", "small-mixed-0"]
    assert [worker.name for worker in cluster.workers] == names
    assert (large.router.name, small.router.name) == ("org-large-router", "small-router")
    assert (large.router.ttft_s_max, small.router.ttft_s_max) == (5, math.inf)
    assert (large.router.replicas, small.router.replicas) == (2, 1)
    assert (large.model_folder, small.model_folder) == (bundled()["keeper"], Path("/models/small"))
    line = "Org/Large, large with 1 prefill + 2 decode; small with 1 mixed"
    assert summary(parse_config(text, "c.yaml")) == line


def test_groups_of_role_differ_and_share_numbering() -> None:
    cluster = fleet(
        "{role: prefill, replicas: 2, device: cuda, num_gpus: 1, labels: {pool: fast}, memory: 64MiB},"
        "{role: prefill, threads: 3, num_cpus: 2, resources: {slow: 0.5}, tensor_parallel_size: 2},"
        "{role: decode}"
    )
    assert [worker.name for worker in cluster.workers] == ["prefill-0", "prefill-1", "prefill-2", "decode-0"]
    fast, _, slow, decode = cluster.workers
    assert (fast.num_gpus, fast.num_cpus, fast.labels, fast.resources) == (1, 0, {"pool": "fast"}, {})
    assert (slow.num_gpus, slow.num_cpus, slow.labels, slow.resources) == (0, 2, {}, {"slow": 0.5})
    assert (fast.engine.device, slow.engine.device) == ("cuda", "cpu")
    assert (engine_of(fast).page_dtype, engine_of(slow).page_dtype) == ("bfloat16", "bfloat16")
    assert (slow.engine.threads, decode.engine.threads) == (3, 1)
    assert [worker.engine.tensor_parallel_size for worker in cluster.workers] == [1, 1, 2, 1]
    assert {worker.engine.tensor_parallel_sizes for worker in cluster.workers} == {(1, 2)}


def test_ranks_over_nodes_need_a_ray_cluster_and_an_address_that_others_reach() -> None:
    groups = "{role: mixed, tensor_parallel_size: 4, tensor_parallel_nodes: 2}"
    with pytest.raises(SettingsError, match=r"nodes 2 needs a Ray cluster of several .*--ray-address"):
        fleet(groups)
    with pytest.raises(SettingsError, match=r"nodes 2: .* set --cluster-host to node, with certificates"):
        settings(f"models: [{{model: keeper, groups: [{groups}]}}]\ncluster: {{ray_address: auto}}")
    over = "cluster: {ray_address: auto, host: node-plain}"
    (worker,) = settings(f"models: [{{model: keeper, groups: [{groups}]}}]\n{over}").workers
    assert (worker.engine.tensor_parallel_nodes, engine_of(worker).backend) == (2, "gloo")


def test_memory_maximum_is_memory_of_all_workers_on_device_type() -> None:
    groups = (
        "{role: prefill, memory: 64MiB, replicas: 2, memory_floor: 8MiB},"
        "{role: decode, memory: 32MiB, replicas: 3},"
        "{role: decode, memory: 1GiB, device: 'cuda:0'}, {role: decode, memory: 512MiB, device: cuda}"
    )
    engines = {worker.name: engine_of(worker) for worker in fleet(groups).workers}
    sizes = {
        name: ((engine.memory_bytes or 0) // MIB, (engine.memory_max_bytes or 0) // MIB)
        for name, engine in engines.items()
    }
    assert sizes == {
        **dict.fromkeys(("prefill-0", "prefill-1"), (64, 2 * 64 + 3 * 32)),
        **dict.fromkeys(("decode-0", "decode-1", "decode-2"), (32, 2 * 64 + 3 * 32)),
        "decode-3": (1024, 1024 + 512),
        "decode-4": (512, 1024 + 512),
    }
    floors = (engines["prefill-0"].memory_floor_bytes, engines["decode-0"].memory_floor_bytes)
    assert floors == (8 * MIB, None)
    unlent = fleet(groups, ", engine: {memory_broker: false}")
    alone = {worker.name: engine_of(worker) for worker in unlent.workers}
    assert (alone["prefill-0"].memory_max_bytes, alone["decode-0"].memory_max_bytes) == (128 * MIB, 64 * MIB)
    assert (engines["decode-0"].memory_broker, alone["decode-0"].memory_broker) == (True, False)


def test_workers_on_gpus_have_one_each_or_the_parts_that_they_ask_for() -> None:
    """Its memory, also that it may borrow, follows from what the device has left."""
    groups = "{role: prefill, device: cuda, memory: 1GiB}, {role: decode, device: cuda}, {role: decode}"
    first, second, host = fleet(groups).workers
    assert [worker.num_gpus for worker in (first, second, host)] == [1, 1, 0]
    assert [worker.engine.memory_bytes for worker in (first, second, host)] == [1 << 30, None, 1 << 30]
    assert [worker.engine.memory_max_bytes for worker in (first, second, host)] == [None, None, 1 << 30]
    assert {worker.engine.device_share for worker in (first, second, host)} == {1.0}
    assert {engine_of(worker).gpu_memory_utilization for worker in (first, second, host)} == {0.9}
    shares = "{role: prefill, device: cuda, num_gpus: 0.25}, {role: decode, device: cuda, num_gpus: 0.75}"
    parts = fleet(shares, ", engine: {gpu_memory_utilization: 0.8}").workers
    assert [(part.num_gpus, part.engine.device_share) for part in parts] == [(0.25, 0.25), (0.75, 0.75)]
    assert engine_of(parts[1]).gpu_memory_utilization == 0.8
    (numbered,) = fleet("{role: mixed, device: 'cuda:1'}").workers
    assert (numbered.num_gpus, numbered.engine.device_share) == (0, 1), "Ray would hide the others"


def vllm_of(*words: object) -> tuple[VllmSettings, ...]:
    (fleet,) = fleets(4, "/models/m", *words)
    assert {worker.build for worker in fleet.workers} == {"tidemill.workers.vllm.build:build_vllm"}
    assert not fleet.router.broker
    engines = [worker.engine.of_worker(worker.name) for worker in fleet.workers]
    return tuple(engine for engine in engines if isinstance(engine, VllmSettings))


def test_vllm_in_each_worker_or_at_urls() -> None:
    own = ("--engine", "vllm", "--mixed", 2, "-tp", 4, "--engine-args", "--x 1", "--engine-python", "/v/py")
    first, _ = vllm_of(*own)
    assert (first.args, first.python) == ("--x 1", Path("/v/py"))
    assert (first.ranks, first.tensor_parallel_size) == (4, 1)
    (on_gpus,) = fleets(4, "/models/m", *own[:2], "-tp", 4, "--device", "cuda", "--mixed", 1)
    assert [worker.num_gpus for worker in on_gpus.workers] == [4], "one process of ours has all ranks"
    apart = vllm_of("--engine", "vllm", "--prefill", 1, "--decode", 2)
    assert [settings.transfers for settings in (first, *apart)] == [False, True, True, True]
    joined = vllm_of("--engine", "vllm=http://a:1,https://b/")
    assert [settings.url for settings in joined] == ["http://a:1", "https://b"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--engine", "sglang"), "engine"),
        (("--engine", "vllm=a:8000"), "engine"),
        (("--engine", "vllm=http://a", "--prefill", 1, "--decode", 1), "each is one mixed worker"),
        (("--engine", "vllm", "--page-size", 32), "--page-size is of our own engine"),
        (("--engine", "vllm", "--memory-floor", "1GiB"), "--memory-floor is of our own engine"),
        (("--engine", "vllm=http://a,http://b", "--mixed", 3), "has 2 URLs: each is one mixed worker"),
        (("--engine", "vllm=http://a", "--mixed-max", 3), "has 1 URLs: each is one mixed worker"),
    ],
)
def test_settings_that_vllm_does_not_have_are_refused(words: tuple[object, ...], problem: str) -> None:
    with pytest.raises((SettingsError, ConfigError), match=problem):
        vllm_of(*words)


def test_workers_do_not_share_a_gpu_by_accident() -> None:
    for groups, shared in (
        ("{role: mixed, replicas: 2, device: 'cuda:1'}", "2 workers would share cuda:1"),
        ("{role: mixed, replicas_max: 3, device: 'cuda:1'}", "3 workers would share cuda:1"),
        ("{role: prefill, device: 'cuda:0'}, {role: decode, device: cuda, num_gpus: 0}", "2 .* share cuda:0"),
    ):
        with pytest.raises(ConfigError, match=rf"groups: {shared}, each with its own weights.*num_gpus to 1"):
            fleet(groups)
    fleet("{role: prefill, device: 'cuda:0'}, {role: decode, device: 'cuda:1'}")


def test_single_group_has_a_worker_for_each_gpu() -> None:
    for groups, more, count in (
        ("{role: mixed, device: cuda}", "", 4),
        ("{role: mixed, device: cuda, tensor_parallel_size: 2}", "", 2),
        ("{role: mixed, device: cuda, replicas: 2}", "", 2),
        ("{role: mixed, device: cuda, replicas_max: 2}", "", 1),
        ("{role: mixed, device: cuda, num_gpus: 0.5}", "", 1),
        ("{role: mixed, device: 'cuda:1'}", "", 1),
        ("{role: mixed}", "", 1),
        ("{role: prefill, device: cuda}, {role: decode, device: cuda}", "", 1),
        ("{role: mixed, device: cuda}", "cluster: {ray_address: auto}", 1),
    ):
        config = parse_config(f"models: [{{model: keeper, groups: [{groups}]}}]\n{more}", "c.yaml")
        [chosen], [without] = (with_visible_gpus(config, lambda gpus=gpus: gpus).models for gpus in (4, 0))
        assert [group.replicas for group in chosen.groups] == [count] * len(chosen.groups)
        assert without.groups[0].replicas == config.models[0].groups[0].replicas, "the worker says why"
    two = parse_config("models: [{model: a, groups: [{role: mixed, device: cuda}]}, {model: b}]", "c.yaml")
    assert with_visible_gpus(two, lambda: 4) == two


def test_models_with_broker_share_one_memory_router() -> None:
    """The first such model has the broker. A model without broker and another device type are separate."""
    text = """
        models:
        - {model: keeper, served_model_name: apart, groups: [{role: mixed, memory: 8MiB}],
           engine: {memory_broker: false}}
        - {model: keeper, served_model_name: first, groups: [{role: mixed, memory: 16MiB, replicas: 2}]}
        - {model: /models/small, served_model_name: second, groups: [
            {role: mixed, memory: 32MiB}, {role: mixed, memory: 64MiB, device: cuda}]}
    """
    cluster = settings(text)
    apart, first, second = (fleet.router for fleet in cluster.fleets)
    assert (apart.broker, apart.memory_router, apart.expected) == (False, None, {"apart-mixed-0"})
    assert (first.broker, first.memory_router) == (True, None)
    assert first.expected == {"first-mixed-0", "first-mixed-1", "second-mixed-0", "second-mixed-1"}
    assert (second.broker, second.memory_router) == (True, "first-router")
    most = {worker.name: (worker.engine.memory_max_bytes or 0) // MIB for worker in cluster.workers}
    shared = dict.fromkeys(("first-mixed-0", "first-mixed-1", "second-mixed-0"), 2 * 16 + 32)
    assert most == {"apart-mixed-0": 16, **shared, "second-mixed-1": 64}
    alone = fleet("{role: mixed}")
    assert (alone.router.expected, alone.router.memory_router) == ({"mixed-0"}, None)


def test_bounds_count_all_groups_of_role_and_first_one_grows() -> None:
    cluster = fleet(
        "{role: prefill}, {role: decode, replicas: 2, replicas_max: 5}, {role: decode, replicas: 3}",
        ", autoscaling: {metrics_interval_s: 1, upscale_delay_s: 5, downscale_delay_s: 50}",
    )
    assert cluster.bounds == {"decode": Bounds(least=5, most=8)}
    assert (cluster.hysteresis.look_s, cluster.hysteresis.up_s, cluster.hysteresis.down_s) == (1, 5, 50)
    assert fleet("{role: mixed}").hysteresis == FleetSettings(workers=cluster.workers).hysteresis, (
        "the same defaults"
    )


def test_model_that_scales_to_zero_holds_requests() -> None:
    keys = "downscale_to_zero_delay_s: 600, cold_start_timeout_s: 90, max_queued_requests: 7"
    scaled = fleet("{role: mixed}", f", autoscaling: {{{keys}}}")
    assert (scaled.hysteresis.zero_s, scaled.cold_start_s_max, scaled.router.held_max) == (600, 90, 7)
    kept = fleet("{role: mixed}", ", autoscaling: {cold_start_timeout_s: 90, max_queued_requests: 7}")
    assert (kept.hysteresis.zero_s, kept.cold_start_s_max, kept.router.held_max) == (math.inf, None, math.inf)


def test_engine_errors_name_path_in_file_and_flag() -> None:
    text = """
        models:
        - {model: keeper}
        - {model: keeper, served_model_name: b, engine: {page_size: 64, checkpoint_interval: 100}, groups: [
            {role: mixed}, {role: mixed, threads: 2}]}
    """
    config = parse_config(text, "c.yaml")
    message = "models[1].engine.checkpoint_interval (--checkpoint-interval) is 100 tokens"
    with pytest.raises(ConfigError) as raised:
        cluster_settings(config, SURROUNDINGS, "c.yaml")
    assert str(raised.value).startswith(f"c.yaml: {message}")
    with pytest.raises(SettingsError, match=r"^--checkpoint-interval is 100"):
        cluster_settings(config, SURROUNDINGS)
    (problem,) = local_problems(config, offline=True)
    assert problem.startswith(message)
    assert with_config_paths("--threads and --kernels, --unknown", 0, 3) == (
        "models[0].groups[3].threads (--threads) and models[0].engine.kernels (--kernels), --unknown"
    )


def test_chat_settings_default_to_model_and_follow_keys() -> None:
    keys = "chat_template: a.jinja, tool_call_parser: granite, reasoning_parser: none"
    first, second = settings(
        f"models: [{{model: keeper, {keys}}}, {{model: keeper, served_model_name: b}}]"
    ).fleets
    assert first.chat == ChatSettings(template="a.jinja", tool_parser="granite", reasoning_parser="none")
    assert second.chat == ChatSettings()
    for key, known in (("tool_call_parser", "hermes"), ("reasoning_parser", "qwen3")):
        with pytest.raises(ConfigError, match=rf"{key} .*auto.*none.*{known}"):
            settings(f"models: [{{model: keeper, {key}: unknown}}]")


def test_telemetry_settings_follow_keys() -> None:
    keys = "log_level: debug, log_json: true, otlp_traces_endpoint: 'grpc://h:1', metrics_alias: vllm"
    config = parse_config(f"models: [{{model: keeper}}]\ntelemetry: {{{keys}}}", "c.yaml")
    wanted = Telemetry(log_level="debug", log_json=True, traces_url="grpc://h:1", metrics_alias="vllm")
    assert telemetry_of(config.telemetry) == wanted


@given(TREES)
def test_worker_and_router_names_are_unique(tree: Tree) -> None:
    config = RootConfig.model_validate(tree)
    try:
        cluster = cluster_settings(config, SURROUNDINGS)
    except SettingsError:  # the engine refuses some combinations
        return
    routers = [name for fleet in cluster.fleets for name in fleet.router.names]
    names = [*routers, *(worker.name for worker in cluster.workers)]
    assert len(set(names)) == len(names)
    for fleet, model in zip(cluster.fleets, config.models, strict=True):
        assert len(fleet.workers) == sum(group.replicas for group in model.groups)
        first = {worker.role: worker for worker in reversed(fleet.workers)}
        for role, bounds in fleet.bounds.items():
            growing = next(group for group in model.groups if group.role == role)
            assert growing.replicas_max == bounds.most - bounds.least + growing.replicas
            assert first[role].engine.device == growing.device


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with weights that are large enough for threads."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(SMALL_BYTES)
    return tmp_path


def fleets(cores: int, *words: object) -> tuple[FleetSettings, ...]:
    config = config_of_options(cli.parser().parse_args(["serve", *map(str, words)]))
    return cluster_settings(config, replace(SURROUNDINGS, cores=cores)).fleets


def threads(cores: int, *words: object) -> list[int]:
    return [worker.engine.threads for fleet in fleets(cores, *words) for worker in fleet.workers]


def test_threads_share_the_cores_of_the_machine(model: Path) -> None:
    assert threads(8, model) == [8]
    assert threads(8, model, "--prefill", 1, "--decode", 2) == [2, 2, 2]
    assert threads(8, model, "--mixed", 2, "-tp", 2) == [2, 2]
    assert threads(2, model, "--mixed", 3) == [1, 1, 1]
    assert threads(8, model, "--threads", 3) == [3]
    assert threads(8, model, "--device", "cuda") == [1]


def test_small_models_run_on_one_thread() -> None:
    assert threads(8, "keeper") == [1]
    assert threads(8, "keeper", "--load-format", "dummy") == [8], "the size is not known"


def test_threads_are_the_reserved_cpus_in_a_joined_cluster(model: Path) -> None:
    assert threads(8, model, "--ray-address", "auto") == [1]
    file = model / "cluster.yaml"
    file.write_text(f"models: [{{model: {model}, groups: [{{role: mixed, num_cpus: 4}}]}}]")
    assert threads(8, "--config", file) == [4]
    assert threads(8, "--config", file, "--ray-address", "auto") == [4]


def test_arrangement_names_the_threads_and_warns_of_too_many(model: Path) -> None:
    assert arrangement(fleets(8, model), 8) == f"{model}: 1 mixed with 8 threads; 8 cores here"
    split = arrangement(fleets(2, "keeper", "--prefill", 1, "--decode", 2), 3)
    assert split == "keeper: 1 prefill with 1 thread, 2 decode with 1 thread; 3 cores here"
    assert "4 threads slow each other" in arrangement(fleets(2, model, "--mixed", 2, "--threads", 2), 2)
    assert "4 threads slow each other" in arrangement(fleets(2, model, "-tp", 2, "--threads", 2), 2)
    assert "slow" not in arrangement(fleets(2, model, "--device", "cuda", "--threads", 9), 2)


def test_cores_are_physical_and_within_the_quota(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    quota = tmp_path / "cpu.max"
    assert count_cores({0, 1, 2, 3}, tmp_path, quota) == 2
    assert count_cores({0, 2}, tmp_path, quota) == 1
    assert count_cores({7, 8, 9}, tmp_path, quota) == 3, "unknown CPUs count"
    for text, cores in (("max 100000", 2), ("150000 100000", 1), ("50000 100000", 1)):
        quota.write_text(text)
        assert count_cores({0, 1, 2, 3}, tmp_path, quota) == cores
