"""`tidemill serve --engine vllm` with the small server of the tests as vLLM: a kill of it, or of its worker,
cuts no stream, and nothing is left."""

import asyncio
from pathlib import Path

from tests.support.e2e.engine_streams import asks, processes, streamed, text_of, wait_for_both
from tests.support.e2e.server import Server
from tests.support.waits import eventually
from tests.support.workers.vllm_server import fake_python

STUBBORN = """\
if "serve" in sys.argv:
    import signal, tempfile
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tempfile.mkdtemp()
"""


def test_kill_of_a_vllm_or_its_worker_cuts_no_stream(tmp_path: Path) -> None:
    python = fake_python(tmp_path, STUBBORN)
    words = ["keeper", "--port", "0", "--engine", "vllm", "--mixed", "2", "--engine-python", str(python)]
    with Server(words, tmp_path / "log") as server:
        calm = asyncio.run(streamed(server, asks("keeper")))
        for victim in ("--enable-scale-out", "ray::WorkerActor"):
            lives = server.lives()
            found = processes(server, victim)
            assert len(found) == 2
            calls = asyncio.run(streamed(server, asks("keeper"), found[0]))
            assert [call.trouble for call in calls] == [[]] * len(calls)
            assert [text_of(call) for call in calls] == [text_of(call) for call in calm]
            eventually(lambda lives=lives: len(set(server.lives().values()) - set(lives.values())) == 1)
            wait_for_both(server)
        assert "vLLM ended with exit code 137" in server.log()
