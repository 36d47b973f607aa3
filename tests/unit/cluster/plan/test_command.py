"""`tidemill plan` as an operator calls it, with a calibration that was measured before."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.cluster.plan.test_search import FOUND
from tests.unit.cluster.simulate.test_trace import line
from tidemill.cluster.cli.main import EXIT_REFUSED, main
from tidemill.cluster.config.reading import read_config
from tidemill.cluster.plan.calibration import write_calibration

EXIT_NONE = 1
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LOAD = ["--request-rate=2", "--input-len=300", "--output-len=8", "--num-prompts=10"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a calibration of keeper."""
    monkeypatch.chdir(tmp_path)
    write_calibration(tmp_path / "times.json", FOUND)
    return tmp_path


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """The folder of a model of 70B parameters without weights."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "llama")


def test_plan_writes_a_file_that_config_check_takes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "keeper", *LOAD, "--calibration=times.json", "--ttft-target=1s", "--itl-target=50ms"]
    assert main([*arguments, "--memory=256MiB"]) == 0
    shown = capsys.readouterr().out
    assert "chosen" in shown
    assert "tidemill serve --config cluster.yaml" in shown
    assert main(["config", "check", "cluster.yaml"]) == 0
    [group] = read_config(here / "cluster.yaml").models[0].groups
    assert (group.role, group.replicas, group.threads, group.memory) == ("mixed", 1, 1, "256MiB")


def test_plan_reads_a_trace_at_its_own_rate_or_another(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(1000 * number, 1100, 4, [1, 2, 10 + number]) for number in range(8)]
    (here / "trace.jsonl").write_text("\n".join(lines))
    spans: list[float] = []
    for rate in ([], ["--request-rate=4"]):
        arguments = ["plan", "keeper", "--trace=trace.jsonl", "--calibration=times.json", "--json"]
        assert main([*arguments, *rate]) == 0
        [card] = json.loads(capsys.readouterr().out)["cards"]
        assert card["chosen"]["requests"] == 8
        assert card["chosen"]["hit_ratio"] > 0.5
        spans.append(card["chosen"]["makespan_s"])
    assert spans[0] > 3 * spans[1]


def test_plan_of_cards_is_an_estimate_that_names_what_does_not_fit(
    here: Path, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", llama, "--load-format=dummy", *LOAD, "--card", "h100", "h200", "--ttft-target=500ms"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "h200 (estimate)" in shown
    assert "h100 (estimate)" in shown
    assert "1 x h200: a rank needs" in shown
    assert "2 ranks fit" in shown
    assert "1 x h100: a rank needs" in shown
    assert (here / "cluster.yaml").read_text().startswith("# 1 mixed, TP 2")
    [group] = read_config(here / "cluster.yaml").models[0].groups
    assert (group.device, group.tensor_parallel_size, group.replicas) == ("cuda", 2, 1)


def test_plan_of_quantised_weights_needs_fewer_cards(
    here: Path, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", llama, "--load-format=dummy", "--quantization=int4", *LOAD, "--card", "h100"]
    assert main(arguments) == 0
    assert "a rank needs" not in capsys.readouterr().out
    [model] = read_config(here / "cluster.yaml").models
    assert (model.engine.quantization, model.groups[0].tensor_parallel_size) == ("int4", 1)


def test_plan_reports_that_nothing_meets_the_targets(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A calibrated step alone takes longer than the target, so nothing is simulated."""
    assert main(["plan", "keeper", *LOAD, "--calibration=times.json", "--itl-target=1ms"]) == EXIT_NONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "nothing here meets the targets" in shown
    assert "a stream 2.4 ms a token: raise the targets" in shown
    assert not (here / "cluster.yaml").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--request-rate=0"], "--request-rate is 0: set it above 0"),
        (["--num-prompts=0"], "--num-prompts is 0"),
        (["--range-ratio=1"], "--range-ratio is 1"),
        (["--ttft-target=soon"], "write it like 500ms"),
        (["--itl-target=0"], "--itl-target is 0: set it above 0"),
        (["--memory=much"], "--memory much"),
        (["--input-len=100000"], "the longest request has"),
        (["--memory=1MiB"], "--memory"),
        (["--calibration=times.json", "--threads=2"], "not of keeper with 2"),
        (["--output=nowhere/cluster.yaml"], "--output nowhere/cluster.yaml"),
    ],
)
@pytest.mark.usefixtures("here")
def test_plan_refuses_impossible_options(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "keeper", *LOAD, "--calibration=times.json", *options]
    assert main(arguments) == EXIT_REFUSED
    assert reason in capsys.readouterr().err


def test_a_fresh_calibration_is_not_measured_for_cards(
    here: Path, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_calibration(here / "times.json", replace(FOUND, model="other"))
    arguments = ["plan", llama, "--load-format=dummy", *LOAD, "--card=h200", "--calibration=times.json"]
    assert main([*arguments, "--json"]) == 0
    [card] = json.loads(capsys.readouterr().out)["cards"]
    assert (card["card"], card["estimate"], card["chosen"]["mixed"]) == ("h200", True, 1)
