"""`tidemill config` lists the errors of a file, or what the file would start."""

import json
from pathlib import Path

import pytest
import trustme
import yaml

from tidemill.cluster.cli import main as cli
from tidemill.cluster.config.reading import parse_config
from tidemill.cluster.config.reference import schema


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


def check(file: Path, text: str, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """Check a file with this text; return the problems."""
    file.write_text(text)
    status = cli.main(["config", "check", str(file), *options])
    out, err = capsys.readouterr()
    assert (status == 0) == bool(out) == (not err)
    assert status in {0, cli.EXIT_REFUSED}
    lines = err.splitlines()
    assert all(line.startswith(f"{file}: ") for line in lines)
    return [line.removeprefix(f"{file}: ") for line in lines]


def test_check_summarizes_a_valid_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(groups: str, *options: str) -> str:
        more = 'store: {url: "file:///nowhere/at/all?size=1GiB"}\ncluster: {ray_address: auto}'
        file.write_text(f"models: [{{model: keeper, groups: [{groups}]}}]\n{more}")
        assert cli.main(["config", "check", *options, str(file)]) == 0
        return capsys.readouterr().out

    host = (
        "{role: prefill, memory: 512MiB}, "
        "{role: decode, replicas: 2, tensor_parallel_size: 2, memory: 256MiB}"
    )
    weights = "weights of each worker: keeper 2.68 MiB\n"
    assert shown(host) == (
        f"{file} is right: keeper with 1 prefill + 2 decode, at http://127.0.0.1:8000\n"
        "5 worker processes with 1 GiB for pages and states, 1 router(s), on the Ray cluster auto, pages in "
        f"file:///nowhere/at/all?size=1GiB\n{weights}"
    )
    assert not Path("/nowhere").exists(), "nothing is opened"
    devices = "{role: mixed, device: cuda}, {role: mixed, memory: 256MiB}"
    assert "with 0.25 GiB and what their GPUs have left for pages and states" in shown(devices)
    assert weights not in shown(devices, "--offline"), "it looks at no model"


def test_check_looks_at_models_memory_and_files(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"""
        models:
        - model: /nowhere
        - model: keeper
          engine: {{tensor_parallel_reduce: exact}}
          groups:
          - {{role: prefill, tensor_parallel_size: 7}}
          - {{role: decode, memory: 1MiB}}
          - {{role: decode, device: "cuda:1", tensor_parallel_size: 2}}
        store: {{url: "memory:", secret_file: {tmp_path}/none}}
        edge: {{api_keys_file: {tmp_path}/none}}
        cluster: {{host: node, ssl_certfile: /nowhere, ssl_keyfile: /nowhere, ssl_ca_certs: /nowhere}}
    """
    problems = dict(line.split(": ", 1) for line in check(file, text, capsys))
    assert list(problems) == [
        "models[0].groups[0]",
        "models[1].groups[0]",
        "models[1].groups[1]",
        "models[1].groups[2].device (--device) cuda:1 is one device",
        "store.url",
        "store.secret_file",
        "edge",
        "cluster",
    ]
    assert "/nowhere" in problems["models[0].groups[0]"], "listed once for both groups"
    assert "--tensor-parallel-size" in problems["models[1].groups[0]"]
    assert "--memory" in problems["models[1].groups[1]"]

    left = check(file, text, capsys, "--offline")
    assert [line.split(": ", 1)[0] for line in left] == [
        "models[1].groups[2].device (--device) cuda:1 is one device",
        "store.url",
    ]


@pytest.mark.parametrize("offline", [[], ["--offline"]])
def test_check_parses_store_urls(file: Path, capsys: pytest.CaptureFixture[str], offline: list[str]) -> None:
    for url, message in (
        ("file:///a?size=much", "size"),
        ("memory:?size=1MiB,file:///a?zzz=1", "zzz"),
        ("memory:,memory:", "inside one process"),
    ):
        text = f"models: [{{model: keeper}}]\nstore: {{url: '{url}'}}"
        (problem,) = check(file, text, capsys, *offline)
        assert problem.startswith("store.url: ")
        assert message in problem


def test_check_reads_certificates_and_secret_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = trustme.CA().issue_cert("127.0.0.1")
    mine.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "pem"))
    (tmp_path / "secret").write_text("11" * 32)
    text = f"""
        models: [{{model: keeper}}]
        store: {{secret_file: {tmp_path}/secret}}
        edge: {{ssl_certfile: {tmp_path}/pem, ssl_keyfile: {tmp_path}/pem}}
    """
    assert check(file, text, capsys) == []
    (tmp_path / "pem").write_text("")
    (problem,) = check(file, text, capsys)
    assert problem.startswith("edge: ")
    assert "PEM" in problem


def test_show_prints_all_keys(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("models: [{model: keeper}]")
    assert cli.main(["config", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert [group["role"] for group in yaml.safe_load(shown)["models"][0]["groups"]] == ["mixed"]
    assert parse_config(shown, "shown") == parse_config(file.read_text(), "file")
    file.write_text("models: 1")
    assert cli.main(["config", "show", str(file)]) == cli.EXIT_REFUSED
    assert str(file) in capsys.readouterr().err


def test_schema_command_prints_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
