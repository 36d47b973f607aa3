"""Threads follow the cores of the machine, the number of ranks and the size of the model."""

from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.serve import config_of_options
from tidemill.cluster.config.fleets import Surroundings, cluster_settings
from tidemill.cluster.config.threads import SMALL_BYTES, arrangement, count_cores
from tidemill.cluster.settings import FleetSettings

SURROUNDINGS = Surroundings(store_url="memory:", cache_folder=Path("cache"))


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
