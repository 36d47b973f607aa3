"""A server is started, watched and ended with all its processes; its facts and refusals come from it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import psutil
import pytest

from tests.support.e2e.server import runs
from tests.support.waits import WAIT_S_MAX, eventually
from tests.support.workers.vllm_server import VllmServer, fake_python, serving
from tidemill.workers.messages import Request
from tidemill.workers.settings import SettingsError
from tidemill.workers.vllm.build import build_vllm, check_vllm
from tidemill.workers.vllm.server_process import EngineEnded
from tidemill.workers.vllm.settings import VllmSettings, command_of, environ_of

DIES = """\
if "serve" in sys.argv:
    print("(EngineCore pid=7) ERROR 11-30 00:37:13 [core.py:1512] ValueError: no room for the cache")
    print("(APIServer pid=6) WARNING 11-30 00:37:14 [x.py:1] as `OSError: too many open files`")
    print("RuntimeError: engine failed. See root cause above.")
    print("(Worker pid=8) ERROR 11-30 00:37:14 [y.py:9] BrokenPipeError: [Errno 32] Broken pipe")
    print("(APIServer pid=6) bye", flush=True)
"""
FORKS = """\
if "serve" in sys.argv:
    child = subprocess.Popen(["sleep", "1000"])
    open({pid!r}, "w").write(str(child.pid))
"""


def silent(done_bytes: int, total_bytes: int) -> None:
    """Report no progress."""


@pytest.fixture
def settings_of(tmp_path: Path) -> Callable[..., VllmSettings]:
    (tmp_path / "config.json").write_text('{"vocab_size": 100, "eos_token_id": 0}')

    def settings_of(
        behaviour: str = "", version: str = "0.32.0+cpu", *, nixl: bool = True, **changes: object
    ) -> VllmSettings:
        python = fake_python(tmp_path, behaviour.format(pid=str(tmp_path / "pid")), version, nixl=nixl)
        plain = VllmSettings(model_folder=tmp_path, cache_folder=tmp_path, store_url="", python=python)
        return replace(plain, **changes)

    return settings_of


def test_command_has_the_arguments_of_the_operator_last(tmp_path: Path) -> None:
    settings = VllmSettings(
        model_folder=tmp_path,
        cache_folder=tmp_path,
        store_url="",
        python=Path("py"),
        args="--port 1 -x 'a b'",
    )
    command = command_of(settings, 8001, 5001)
    assert command[:5] == ["py", "-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path)]
    assert command[-4:] == ["--port", "1", "-x", "a b"]
    assert command[command.index("--port") + 1] == "8001"
    assert json.loads(command[command.index("--kv-events-config") + 1])["endpoint"] == "tcp://127.0.0.1:5001"
    assert "--max-model-len" not in command
    assert "--max-model-len" in command_of(replace(settings, max_model_len=64), 1, 2)
    with pytest.raises(SettingsError, match="--engine-args"):
        replace(settings, args="'")


def test_environment_is_that_of_the_other_python(tmp_path: Path) -> None:
    settings = VllmSettings(
        model_folder=tmp_path, cache_folder=tmp_path, store_url="", python=Path("py"), threads=3
    )
    changes = environ_of(settings, "key", 7)
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in changes
    assert changes["PYTHONPATH"] is None
    assert (changes["OMP_NUM_THREADS"], changes["VLLM_API_KEY"]) == ("3", "key")
    assert "OMP_NUM_THREADS" not in environ_of(replace(settings, device="cuda"), "key")


def test_servers_that_pull_from_each_other_keep_blocks_longer_than_a_step(tmp_path: Path) -> None:
    plain = VllmSettings(model_folder=tmp_path, cache_folder=tmp_path, store_url="", python=Path("py"))
    assert "--kv-transfer-config" not in command_of(plain, 1, 2)
    settings = replace(plain, transfers=True).of_worker("prefill-0", "10.0.0.1")
    for device, wedged_s_max in (("cpu", 120), ("cuda", 30)):
        words = command_of(replace(settings, device=device), 1, 2)
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("NixlConnector", "recompute")
        assert config["kv_connector_extra_config"]["kv_lease_duration"] > 1.2 * wedged_s_max
    channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "7"}
    assert environ_of(settings, "key", 7).items() >= channel.items()


def test_worker_of_urls_has_the_one_of_its_number(tmp_path: Path) -> None:
    settings = VllmSettings(
        model_folder=tmp_path,
        cache_folder=tmp_path,
        store_url="",
        python=Path("py"),
        urls=("http://a", "http://b"),
    )
    assert settings.of_worker("m-mixed-1").url == "http://b"
    with pytest.raises(SettingsError, match=r"2 URLs, and mixed-2 has none"):
        settings.of_worker("mixed-2")


def test_environments_without_vllm_or_with_an_old_one_are_refused(
    settings_of: Callable[..., VllmSettings], tmp_path: Path
) -> None:
    check_vllm(settings_of(), here=True)
    check_vllm(settings_of(python=tmp_path / "none"), here=False)
    with pytest.raises(SettingsError, match=r"has vLLM 0\.31\.2, and 0\.32 is the oldest"):
        check_vllm(settings_of(version="0.31.2"), here=True)
    check_vllm(settings_of(transfers=True), here=True)
    with pytest.raises(SettingsError, match=r"need NIXL: .*python -m pip install nixl"):
        check_vllm(settings_of(nixl=False, transfers=True), here=True)
    with pytest.raises(SettingsError, match="set it to the python of an environment"):
        check_vllm(settings_of(python=tmp_path / "none"), here=True)


def test_server_serves_and_ends_with_its_processes(
    settings_of: Callable[..., VllmSettings], tmp_path: Path
) -> None:
    built = build_vllm(settings_of(FORKS), silent)
    info = built.info
    assert (info.page_tokens, info.page_bytes, info.memory_bytes) == (4, 64, 4096)
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids, info.roles) == (
        512,
        100,
        (0,),
        ("mixed",),
    )
    assert built.group is not None
    built.group.check()
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    built.group.stop()
    eventually(lambda: not runs(child))
    asyncio.run(built.engine.close())
    with pytest.raises(EngineEnded, match="vLLM ended with exit code"):
        built.group.check()


@pytest.mark.parametrize(
    ("end", "line"),
    [
        ("sys.exit(3)", "3: ValueError: no room for the cache"),
        ("sys.exit(2)", "2: ValueError: no room for the cache; correct --engine-args"),
        ("os.kill(os.getpid(), 9)", "137: it was killed: if memory ran out, lower --memory, .*"),
    ],
)
def test_server_that_dies_at_its_start_is_one_line(
    settings_of: Callable[..., VllmSettings], end: str, line: str
) -> None:
    with pytest.raises(EngineEnded, match=f"^vLLM ended with exit code {line}$"):
        build_vllm(settings_of(f"{DIES}    {end}\n"), silent)


def test_servers_whose_guards_are_killed_end(
    settings_of: Callable[..., VllmSettings], tmp_path: Path
) -> None:
    """A kill of all processes with "vllm" in their commands leaves children of vLLM that hold its output."""
    failed: list[Exception] = []

    def build() -> None:
        with pytest.raises(EngineEnded, match="it was killed") as raised:
            build_vllm(settings_of(f"{FORKS}    __import__('time').sleep(999)\n"), silent)
        failed.append(raised.value)

    building = Thread(target=build, daemon=True)
    building.start()
    eventually(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    for process in psutil.Process().children(recursive=True):
        if process.pid != child.pid:
            process.kill()
    building.join(WAIT_S_MAX)
    assert failed
    eventually(lambda: not runs(child))


def test_guard_kills_what_ignores_the_end(tmp_path: Path) -> None:
    stubborn = (
        "import os, signal, tempfile, time; signal.signal(15, signal.SIG_IGN); tempfile.mkdtemp();"
        "print(os.getenv('SHOWN'), os.getenv('PATH'), flush=True); time.sleep(999)"
    )
    code = "import sys; from tidemill.workers.vllm import guard; guard.GRACE_S = 0.1;"
    code += "sys.exit(guard.run_apart(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, sys.executable, "-c", stubborn],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b'{"SHOWN": "up", "PATH": null}\n')
    process.stdin.flush()
    assert int(process.stdout.readline()) > 0
    assert process.stdout.readline() == b"up None\n"
    assert [*tmp_path.glob("vllm-*/*")]
    process.communicate()  # closes its standard input, as the end of a worker does
    assert process.returncode == 128 + 9
    assert not [*tmp_path.iterdir()]


async def test_joined_server_is_asked_whether_it_knows_priorities(
    settings_of: Callable[..., VllmSettings],
) -> None:
    for knows in (True, False):
        async with serving(VllmServer(prioritizes=knows)) as server:
            settings = settings_of(urls=(server.url,)).of_worker("mixed-0")
            built = await asyncio.to_thread(build_vllm, settings, silent)
            assert built.group is None
            request = Request(request_id="r", tokens=(1,), max_new_tokens=1, priority=1)
            await built.engine.stream(request, lambda _: None)
            assert (server.bodies[-1]["priority"] > 0) is knows
            await built.engine.close()
    with pytest.raises(EngineEnded, match="no vLLM is ready at"):
        await asyncio.to_thread(build_vllm, settings, silent)


@pytest.mark.parametrize(
    ("endpoints", "warned"),
    [
        (["tcp://*:5557"], ""),
        ([], "it has none"),
        (["tcp://127.0.0.1:5557"], "it has tcp://127.0.0.1:5557"),
        (["tcp://*:5557", "tcp://*:5558"], "and one engine"),
    ],
)
async def test_joined_server_that_announces_nothing_is_named(
    settings_of: Callable[..., VllmSettings],
    caplog: pytest.LogCaptureFixture,
    endpoints: list[str],
    warned: str,
) -> None:
    async with serving(VllmServer()) as server:
        server.sources = {str(rank): {"endpoint": endpoint} for rank, endpoint in enumerate(endpoints)}
        settings = settings_of(urls=(server.url,)).of_worker("mixed-0")
        await (await asyncio.to_thread(build_vllm, settings, silent)).engine.close()
    assert ("announces nothing" in caplog.text) == bool(warned)
    assert warned in caplog.text
