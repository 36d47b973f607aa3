"""From a configuration to the settings of its cluster."""

from pathlib import Path

import pytest
from hypothesis import given

from tests.support.cluster.configs import TREES, Tree
from tidemill.cluster.cli.config import problems_here
from tidemill.cluster.config.flags import with_places
from tidemill.cluster.config.fleets import Surroundings, cluster_settings, summary, telemetry_of
from tidemill.cluster.config.problems import ConfigError
from tidemill.cluster.config.reading import parse_config
from tidemill.cluster.config.tree import RootConfig
from tidemill.cluster.messages import Bounds
from tidemill.cluster.observability.telemetry import Telemetry
from tidemill.cluster.settings import ChatSettings, ClusterSettings, FleetSettings
from tidemill.workers.models.bundled import bundled
from tidemill.workers.settings import SettingsError

AROUND = Surroundings(store_url="memory:", cache_folder=Path("cache"))
MIB = 1 << 20


def settings(text: str) -> ClusterSettings:
    return cluster_settings(parse_config(text, "c.yaml"), AROUND)


def fleet(groups: str, more: str = "") -> FleetSettings:
    (found,) = settings(f"models: [{{model: keeper, groups: [{groups}]{more}}}]").fleets
    return found


def test_several_models_have_fleets_of_their_own() -> None:
    text = """
        models:
        - model: keeper
          served_model_name: [Org/Large, large]
          groups: [{role: prefill}, {role: decode, replicas: 2}]
          ttft_max: 5
          routers: 2
        - model: /models/small
          served_model_name: small
          groups: [{role: mixed, memory: 16MiB}]
        cluster: {ray_address: auto, namespace: blue}
    """
    made = settings(text)
    large, small = made.fleets
    assert (made.ray_address, made.namespace) == ("auto", "blue")
    assert (large.names, small.names) == (("Org/Large", "large"), ("small",))
    assert [worker.name for worker in made.workers] == [
        "org-large-prefill-0",
        "org-large-decode-0",
        "org-large-decode-1",
        "small-mixed-0",
    ]
    assert (large.router.name, small.router.name) == ("org-large-router", "small-router")
    assert (large.router.ttft_s_max, small.router.ttft_s_max) == (5, 60)
    assert (large.router.replicas, small.router.replicas) == (2, 1)
    assert (large.model_folder, small.model_folder) == (bundled()["keeper"], Path("/models/small"))
    said = summary(parse_config(text, "c.yaml"))
    assert said == "Org/Large, large with 1 prefill + 2 decode; small with 1 mixed"


def test_one_model_has_plain_names() -> None:
    made = settings("models: [{model: keeper, served_model_name: [a, b]}]")
    (one,) = made.fleets
    assert one.names == ("a", "b")
    assert [worker.name for worker in one.workers] == ["prefill-0", "decode-0"]
    assert one.router.name == "router"
    assert (made.ray_address, one.bounds) == (None, {})


def test_groups_of_one_role_differ_and_count_on() -> None:
    made = fleet(
        "{role: prefill, replicas: 2, device: cuda, num_gpus: 1, labels: {pool: fast}, memory: 64MiB},"
        "{role: prefill, threads: 3, num_cpus: 2, resources: {slow: 0.5}, tensor_parallel_size: 2},"
        "{role: decode}"
    )
    assert [worker.name for worker in made.workers] == ["prefill-0", "prefill-1", "prefill-2", "decode-0"]
    fast, _, slow, decode = made.workers
    assert (fast.num_gpus, fast.num_cpus, fast.labels, fast.resources) == (1, 0, {"pool": "fast"}, {})
    assert (slow.num_gpus, slow.num_cpus, slow.labels, slow.resources) == (0, 2, {}, {"slow": 0.5})
    assert (fast.engine.device, slow.engine.device) == ("cuda", "cpu")
    assert (fast.engine.page_dtype, slow.engine.page_dtype) == ("bfloat16", "bfloat16")
    assert (slow.engine.threads, decode.engine.threads) == (3, 1)
    assert [worker.engine.tensor_parallel_size for worker in made.workers] == [1, 1, 2, 1]
    assert {worker.engine.tensor_parallel_sizes for worker in made.workers} == {(1, 2)}


def test_a_worker_may_come_to_have_what_all_on_its_device_bring() -> None:
    groups = (
        "{role: prefill, memory: 64MiB, replicas: 2, memory_floor: 8MiB},"
        "{role: decode, memory: 32MiB, replicas: 3},"
        "{role: decode, memory: 1GiB, device: 'cuda:0'}, {role: decode, memory: 512MiB, device: cuda}"
    )
    engines = {worker.name: worker.engine for worker in fleet(groups).workers}
    assert {name: one.memory_bytes // MIB for name, one in engines.items()} == {
        "prefill-0": 64,
        "prefill-1": 64,
        "decode-0": 32,
        "decode-1": 32,
        "decode-2": 32,
        "decode-3": 1024,
        "decode-4": 512,
    }
    most = {name: (one.memory_max_bytes or 0) // MIB for name, one in engines.items()}
    assert {most[name] for name in ("prefill-0", "decode-2")} == {2 * 64 + 3 * 32}
    assert {most[name] for name in ("decode-3", "decode-4")} == {1024 + 512}
    assert (engines["prefill-0"].memory_floor_bytes, engines["decode-0"].memory_floor_bytes) == (
        8 * MIB,
        None,
    )

    alone = {one.name: one.engine for one in fleet(groups, ", engine: {memory_broker: false}").workers}
    assert (alone["prefill-0"].memory_max_bytes, alone["decode-0"].memory_max_bytes) == (128 * MIB, 64 * MIB)
    assert (engines["decode-0"].starts_at_floor, alone["decode-0"].starts_at_floor) == (True, False)


def test_models_that_lend_have_one_broker() -> None:
    """The first of them hears the workers of all; one without a broker stands apart, and a device of another
    kind brings nothing."""
    text = """
        models:
        - {model: keeper, served_model_name: apart, groups: [{role: mixed, memory: 8MiB}],
           engine: {memory_broker: false}}
        - {model: keeper, served_model_name: first, groups: [{role: mixed, memory: 16MiB, replicas: 2}]}
        - {model: /models/small, served_model_name: second, groups: [
            {role: mixed, memory: 32MiB}, {role: mixed, memory: 64MiB, device: cuda}]}
    """
    made = settings(text)
    apart, first, second = (one.router for one in made.fleets)
    assert (apart.broker, apart.memory_router, apart.expected) == (False, None, {"apart-mixed-0"})
    assert (first.broker, first.memory_router) == (True, None)
    assert first.expected == {"first-mixed-0", "first-mixed-1", "second-mixed-0", "second-mixed-1"}
    assert (second.broker, second.memory_router) == (True, "first-router")
    most = {one.name: (one.engine.memory_max_bytes or 0) // MIB for one in made.workers}
    assert most == {
        "apart-mixed-0": 16,
        "first-mixed-0": 2 * 16 + 32,
        "first-mixed-1": 2 * 16 + 32,
        "second-mixed-0": 2 * 16 + 32,
        "second-mixed-1": 64,
    }
    alone = fleet("{role: mixed}")
    assert (alone.router.expected, alone.router.memory_router) == ({"mixed-0"}, None)


def test_bounds_are_of_a_role_and_its_first_group_grows() -> None:
    made = fleet(
        "{role: prefill}, {role: decode, replicas: 2, replicas_max: 5}, {role: decode, replicas: 3}",
        ", autoscaling: {metrics_interval_s: 1, upscale_delay_s: 5, downscale_delay_s: 50}",
    )
    assert made.bounds == {"decode": Bounds(least=5, most=8)}
    assert (made.hysteresis.look_s, made.hysteresis.up_s, made.hysteresis.down_s) == (1, 5, 50)
    assert fleet("{role: mixed}").hysteresis == FleetSettings(workers=made.workers).hysteresis, (
        "the same defaults"
    )


def test_what_an_engine_refuses_is_told_by_the_key_of_the_file() -> None:
    text = """
        models:
        - {model: keeper}
        - {model: keeper, served_model_name: b, engine: {page_size: 64, checkpoint_interval: 100}, groups: [
            {role: mixed}, {role: mixed, threads: 2}]}
    """
    config = parse_config(text, "c.yaml")
    told = "models[1].engine.checkpoint_interval (--checkpoint-interval) is 100 tokens"
    with pytest.raises(ConfigError) as by_key:
        cluster_settings(config, AROUND, "c.yaml")
    assert str(by_key.value).startswith(f"c.yaml: {told}")
    with pytest.raises(SettingsError, match=r"^--checkpoint-interval is 100"):
        cluster_settings(config, AROUND)
    (problem,) = problems_here(config, offline=True)
    assert problem.startswith(told)
    assert with_places("--threads and --kernels, --unknown", 0, 3) == (
        "models[0].groups[3].threads (--threads) and models[0].engine.kernels (--kernels), --unknown"
    )


def test_chats_are_read_as_the_model_has_it_or_as_told() -> None:
    model = "{model: keeper, served_model_name: NAME, KEYS}"
    told = model.replace("KEYS", "chat_template: a.jinja, tool_call_parser: granite, reasoning_parser: none")
    plain = model.replace(", KEYS", "").replace("NAME", "b")
    first, second = settings(f"models: [{told.replace('NAME', 'a')}, {plain}]").fleets
    assert first.chat == ChatSettings(template="a.jinja", tool_parser="granite", reasoning_parser="none")
    assert second.chat == ChatSettings()


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("tool_call_parser", ["hermes", "llama3_json", "openai"]),
        ("reasoning_parser", ["qwen3", "deepseek_r1"]),
    ],
)
def test_a_parser_that_nobody_knows_is_refused_with_those_that_there_are(key: str, known: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(f"models: [{{model: keeper, {key}: unheard-of}}]")
    assert all(name in str(refused.value) for name in ["auto", "none", *known])


def test_what_processes_tell() -> None:
    text = """
        models: [{model: keeper}]
        telemetry: {log_level: debug, log_json: true, otlp_traces_endpoint: "grpc://h:1", metrics_alias: vllm}
    """
    assert telemetry_of(parse_config(text, "c.yaml").telemetry) == Telemetry(
        log_level="debug", log_json=True, traces_url="grpc://h:1", metrics_alias="vllm"
    )


@given(TREES)
def test_names_are_unique_and_all_workers_are_there(tree: Tree) -> None:
    config = RootConfig.model_validate(tree)
    try:
        made = cluster_settings(config, AROUND)
    except SettingsError:  # what goes together is the engine's to say
        return
    names = [worker.name for worker in made.workers] + [
        name for one in made.fleets for name in one.router.names
    ]
    assert len(set(names)) == len(names)
    for one, model in zip(made.fleets, config.models, strict=True):
        assert len(one.workers) == sum(group.replicas for group in model.groups)
        first = {worker.role: worker for worker in reversed(one.workers)}
        for role, bounds in one.bounds.items():
            growing = next(group for group in model.groups if group.role == role)
            assert growing.replicas_max == bounds.most - bounds.least + growing.replicas
            assert first[role].engine.device == growing.device
