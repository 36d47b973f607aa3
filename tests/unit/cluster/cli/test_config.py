"""`tidemill config`: all that is wrong with a file, and what it would start."""

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


def checked(file: Path, text: str, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """What is wrong with it."""
    file.write_text(text)
    status = cli.main(["config", "check", str(file), *options])
    out, err = capsys.readouterr()
    assert (status == 0) == bool(out) == (not err)
    assert status in {0, cli.EXIT_REFUSED}
    lines = err.splitlines()
    assert all(line.startswith(f"{file}: ") for line in lines)
    return [line.removeprefix(f"{file}: ") for line in lines]


def test_a_right_file_says_what_it_would_start(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("""
        models:
        - model: keeper
          groups:
          - {role: prefill, memory: 512MiB}
          - {role: decode, replicas: 2, tensor_parallel_size: 2, memory: 256MiB}
        store: {url: "file:///nowhere/at/all?size=1GiB"}
        cluster: {ray_address: auto}
    """)
    assert cli.main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == (
        f"{file} is right: keeper with 1 prefill + 2 decode, at http://127.0.0.1:8000\n"
        "5 worker processes with 1 GiB for pages and states, 1 router(s), on the Ray cluster auto, pages in "
        "file:///nowhere/at/all?size=1GiB\n"
    )
    assert not Path("/nowhere").exists(), "nothing is opened"


def test_all_mistakes_are_told_at_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(file, "models: [{model: a, routers: 0}]\nedge: {prot: 1, port: x}", capsys) == [
        "models[0].routers is 0: set it to 1 or more",
        "edge.port is 'x': it takes a whole number",
        "edge.prot: there is no such key here: did you mean port?",
    ]
    assert checked(file, "{", capsys)[0].startswith("is no YAML")


def test_what_only_looking_tells(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"""
        models:
        - model: /nowhere
        - model: keeper
          groups:
          - {{role: prefill, tensor_parallel_size: 7}}
          - {{role: decode, memory: 1MiB}}
          - {{role: decode, device: cuda, tensor_parallel_size: 2}}
        store: {{url: "memory:", secret_file: {tmp_path}/none}}
        edge: {{api_keys_file: {tmp_path}/none}}
        cluster: {{host: node, ssl_certfile: /nowhere, ssl_keyfile: /nowhere, ssl_ca_certs: /nowhere}}
    """
    found = dict(line.split(": ", 1) for line in checked(file, text, capsys))
    assert list(found) == [
        "models[0].groups[0]",
        "models[1].groups[0]",
        "models[1].groups[1]",
        "models[1].groups[2].tensor_parallel_size (--tensor-parallel-size) 2",
        "store.url",
        "store.secret_file",
        "edge",
        "cluster",
    ]
    assert "/nowhere" in found["models[0].groups[0]"], "once, for both groups"
    assert "--tensor-parallel-size" in found["models[1].groups[0]"]
    assert "--memory" in found["models[1].groups[1]"]

    left = checked(file, text, capsys, "--offline")
    assert [line.split(": ", 1)[0] for line in left] == [
        "models[1].groups[2].tensor_parallel_size (--tensor-parallel-size) 2",
        "store.url",
    ]


@pytest.mark.parametrize("offline", [[], ["--offline"]])
def test_stores_are_checked_as_text(
    file: Path, capsys: pytest.CaptureFixture[str], offline: list[str]
) -> None:
    for url, says in (
        ("file:///a?size=much", "size"),
        ("memory:?size=1MiB,file:///a?zzz=1", "zzz"),
        ("memory:,memory:", "inside one process"),
    ):
        text = f"models: [{{model: keeper}}]\nstore: {{url: '{url}'}}"
        (problem,) = checked(file, text, capsys, *offline)
        assert problem.startswith("store.url: ")
        assert says in problem


def test_a_master_that_others_run_is_right_from_here(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "models: [{model: keeper}]\nstore: {url: 'mooncake://there:50051'}"
    assert checked(file, text, capsys, "--offline") == []


def test_certificates_and_keys_that_are_there(
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
    assert checked(file, text, capsys) == []
    (tmp_path / "pem").write_text("")
    (problem,) = checked(file, text, capsys)
    assert problem.startswith("edge: ")
    assert "PEM" in problem


def test_show_has_the_whole_tree(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("models: [{model: keeper}]")
    assert cli.main(["config", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert [group["role"] for group in yaml.safe_load(shown)["models"][0]["groups"]] == ["prefill", "decode"]
    assert parse_config(shown, "shown") == parse_config(file.read_text(), "file")
    file.write_text("models: 1")
    assert cli.main(["config", "show", str(file)]) == cli.EXIT_REFUSED
    assert str(file) in capsys.readouterr().err


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
