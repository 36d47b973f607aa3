"""The command line: mistakes that are refused before anything starts, and its small commands."""

import argparse
import json
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.quiet import same_logs_afterwards
from tidemill.cluster.cli import main as cli
from tidemill.workers.sources.names import bundled


@pytest.fixture(autouse=True)
def _same_environment_afterwards(  # pyright: ignore[reportUnusedFunction]
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Restore the environment for Ray and the logging that the command changes."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")
    with same_logs_afterwards():
        yield


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


def test_serve_refuses_missing_model_folder(refused: Refused) -> None:
    assert "/nowhere" in refused("serve", "/nowhere")


def test_serve_refuses_unknown_architecture(refused: Refused, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    line = refused("serve", str(model))
    assert "MambaForCausalLM" in line
    assert "Qwen3NextForCausalLM" in line


def test_serve_refuses_corrupt_safetensors(refused: Refused, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    assert "model.safetensors" in refused("serve", str(model))


def test_serve_refuses_port_in_use(refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "--port" in refused("serve", "keeper", "--port", str(taken.getsockname()[1]))


def test_serve_refuses_store_path_that_is_not_writable(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path) in refused("serve", "keeper", "--store", f"file://{tmp_path}/file/store")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--memory", "much"), "--memory"),
        (("--memory", "1MiB"), "--memory"),
        (("--memory-floor", "little"), "--memory-floor"),
        (("--memory", "64MiB", "--memory-floor", "1GiB"), "--memory-floor"),
        (("--checkpoint-interval", "65"), "--checkpoint-interval"),
        (("--checkpoints-per-path", "0"), "--checkpoints-per-path"),
        (("--mixed", "1", "--decode", "1"), "--mixed"),
        (("--prefill", "0"), "--prefill"),
        (("--tensor-parallel-size", "0"), "--tensor-parallel-size"),
        (("--mixed", "1", "--decode-tensor-parallel-size", "2"), "--decode-tensor-parallel-size"),
        (("--prefill", "2", "--prefill-max", "1"), "--prefill-max is 1"),
        (("--decode", "1", "--mixed-max", "2"), "--mixed-max"),
        (("--ttft-max", "0"), "--ttft-max"),
        (("--send-timeout", "-1"), "--send-timeout"),
        (("--routers", "0"), "--routers"),
        (("--config", "/nowhere"), "/nowhere"),
        (("-tp", "7"), "--tensor-parallel-size"),
        (("--store", "memory:"), "file:///path"),
        (("--store", "mooncake://127.0.0.1:9"), "mooncake?size=8GiB"),
        (("--store", "mooncake?size=much"), "512MiB"),
        (("--store-secret-file", "/nowhere"), "openssl rand -hex 32"),
        (("--page-size", "0"), "--page-size"),
        (("--device", "tpu"), "--device"),
        (("--device", "cuda", "--kernels", "cpu"), "--kernels"),
        (("--device", "cuda", "--backing", "mmap"), "--backing"),
        (("--backing", "kvcached"), "--backing"),
        (("--device", "cuda", "-tp", "2"), "no CUDA device here"),
        (("--device", "cuda:1", "-tp", "2"), "set it to cuda for the 2 ranks"),
        (("--port", "65536"), "--port"),
        (("--host", "no.such.host.invalid"), "--host"),
    ],
)
def test_serve_names_wrong_option(refused: Refused, arguments: tuple[str, ...], named: str) -> None:
    assert named in refused("serve", "keeper", *arguments)


@pytest.mark.parametrize("command", ["status", "memory"])
def test_command_without_server_names_url(refused: Refused, command: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    assert "--url" in refused(command, "--url", url)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--worker", "decode-0"), "--budget"),
        (("--budget", "1GiB"), "--worker"),
        (("--worker", "decode-0", "--budget", "most"), "512MiB"),
    ],
)
def test_memory_command_needs_worker_and_size(
    refused: Refused, arguments: tuple[str, ...], named: str
) -> None:
    assert named in refused("memory", *arguments)


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


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(
        word in script for word in ("serve", "simulate", "--no-enable-prefix-caching", "--gsp-num-groups")
    )


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
