"""The command line: mistakes that are refused before anything starts, and its small commands."""

import argparse
import json
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tidemill.cluster.cli import main as cli
from tidemill.workers.sources.names import bundled


@pytest.fixture(autouse=True)
def _same_environment_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment for Ray that the command changes."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model, to be damaged."""
    return Path(shutil.copytree(bundled()["keeper"], tmp_path / "model"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> "Refused":
    return Refused(capsys)


class Refused:
    """Runs a command that must be refused, and returns its single line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> str:
        assert cli.main(arguments) == cli.EXIT_REFUSED
        out, err = self._capsys.readouterr()
        assert out == ""
        assert err.startswith("tidemill: ")
        assert err.count("\n") == 1
        return err


def test_models_lists_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    name, folder = capsys.readouterr().out.split()
    assert name == "keeper"
    assert (Path(folder) / "model.safetensors").exists()


def test_serve_refuses_unusable_models(refused: Refused, model: Path) -> None:
    assert "/nowhere" in refused("serve", "/nowhere")
    weights, config = model / "model.safetensors", json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    line = refused("serve", str(model))
    assert "MambaForCausalLM" in line
    assert "Qwen3NextForCausalLM" in line
    (model / "config.json").write_text(json.dumps(config))
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    assert "model.safetensors" in refused("serve", str(model))


def test_serve_refuses_port_in_use_and_store_path_that_is_not_writable(
    refused: Refused, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "--port" in refused("serve", "keeper", "--port", str(taken.getsockname()[1]))
    (tmp_path / "file").write_text("")
    assert str(tmp_path) in refused("serve", "keeper", "--store", f"file://{tmp_path}/file/store")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("serve keeper --memory 1MiB", "--memory"),
        ("serve keeper --memory-floor little", "--memory-floor"),
        ("serve keeper --memory 64MiB --memory-floor 1GiB", "--memory-floor"),
        ("serve keeper --checkpoint-interval 65", "--checkpoint-interval"),
        ("serve keeper --state-dtype bfloat16 --checkpoint-dtype float32", "--checkpoint-dtype"),
        ("serve keeper --checkpoints-per-path 0", "--checkpoints-per-path"),
        ("serve keeper --mixed 1 --decode-tensor-parallel-size 2", "--decode-tensor-parallel-size"),
        ("serve keeper --send-timeout -1", "--send-timeout"),
        ("serve keeper --config /nowhere", "/nowhere"),
        ("serve keeper -tp 7", "--tensor-parallel-size"),
        ("serve keeper --store memory:", "file:///path"),
        ("serve keeper --store mooncake://127.0.0.1:9", "mooncake?size=8GiB"),
        ("serve keeper --store mooncake?size=much", "512MiB"),
        ("serve keeper --store-secret-file /nowhere", "openssl rand -hex 32"),
        ("serve keeper --page-size 0", "--page-size"),
        ("serve keeper --device tpu", "--device"),
        ("serve keeper --device cuda --kernels cpu", "--kernels"),
        ("serve keeper --device cuda --backing mmap", "--backing"),
        ("serve keeper --backing kvcached", "--backing"),
        ("serve keeper --device cuda -tp 2", "no CUDA device here"),
        ("serve keeper --device cuda:1 -tp 2", "set it to cuda for the 2 ranks"),
        ("serve keeper --host no.such.host.invalid", "--host"),
        ("memory --worker decode-0", "--budget"),
        ("memory --budget 1GiB", "--worker"),
        ("memory --worker decode-0 --budget most", "512MiB"),
    ],
)
def test_wrong_option_is_named(refused: Refused, command: str, named: str) -> None:
    assert named in refused(*command.split())


def test_command_without_server_names_url(refused: Refused) -> None:
    for command in ("status", "memory"):
        assert "--url" in refused(command, "--url", "http://127.0.0.1:9")


@pytest.mark.parametrize("is_ignored", [False, True])
def test_closed_terminal_stops_the_command_unless_it_is_ignored(
    *, is_ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: argparse.Namespace) -> int:
        signal.raise_signal(signal.SIGHUP)
        return 0

    def parser() -> argparse.ArgumentParser:
        command = argparse.ArgumentParser()
        command.set_defaults(run=run)
        return command

    monkeypatch.setattr(cli, "parser", parser)
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        assert cli.main([]) == (0 if is_ignored else cli.EXIT_INTERRUPTED)
    finally:
        for number, disposition in before.items():
            signal.signal(number, disposition)


def test_cleanup_lists_and_removes_folders_of_killed_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "STORE_FOLDERS", (tmp_path / "shm", tmp_path / "missing"))
    left = [tmp_path / "tidemill-abcdefgh", tmp_path / "shm/tidemill-store-abcdefgh"]
    for folder in left:
        (folder / "files").mkdir(parents=True)
        (folder / ".lock").touch()
        (folder / "files/page").write_bytes(bytes(5000))
    for options, verb in ((["--dry-run"], "would remove"), ([], "removed")):
        assert all(folder.exists() for folder in left)
        assert cli.main(["cleanup", *options]) == 0
        assert capsys.readouterr().out.splitlines() == [f"{verb} {folder} (8.00 KiB)" for folder in left]
    assert not any(folder.exists() for folder in left)
    assert cli.main(["cleanup"]) == 0
    assert capsys.readouterr().out == ""


def test_bash_completes_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    words = (
        'COMP_WORDS=(tidemill serve keeper --max-mod); COMP_CWORD=3; _shtab_tidemill; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["/bin/bash", "-c", f"source {script}; {words}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["--max-model-len"]
