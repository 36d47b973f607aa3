"""A Ray job whose worker runs a vLLM, on a cluster that others started."""

import sys
import tempfile
from pathlib import Path

import httpx

from tests.support.e2e.engine_streams import CLIENT_S_MAX
from tests.support.e2e.nodes import RAY, Nodes
from tests.support.e2e.server import command_of
from tests.support.waits import eventually

TIDEMILL = Path(sys.executable).parent / "tidemill"
OPTIONS = "--served-model-name dense --ray-address auto --port 0 --engine vllm --mixed 1 --memory 256MiB"
ARGUMENTS = ("--max-model-len", "4096", "--engine-args", "--enforce-eager --dtype bfloat16")


def test_ray_job_answers_a_chat_and_ends_its_vllm(vllm_python: Path, model: Path, tmp_path: Path) -> None:
    (template := tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    files = f"--engine-python {vllm_python} --chat-template {template}"
    command = f"{TIDEMILL} serve {model} {OPTIONS} {files}".split()
    with tempfile.TemporaryDirectory(prefix="job-") as folder:  # a short path, for Ray's sockets
        nodes = Nodes(Path(folder), dashboard=True)
        try:
            job = nodes.submit(tmp_path, *command, *ARGUMENTS)
            url, cluster = nodes.job_url(job), f"--address={nodes.url}"
            body = {"model": "dense", "messages": [{"role": "user", "content": "Hello"}]}
            body |= {"max_tokens": 8, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=CLIENT_S_MAX).json()
            assert answer["usage"]["completion_tokens"] == 8, answer

            def running(*names: str) -> list[str]:
                lines = map(command_of, nodes.processes())
                return [line for line in lines if any(name in line for name in names)]

            vllm = ("vllm.entrypoints", "VLLM::EngineCore", "VLLM::Worker")
            ours = (*vllm, "ray::WorkerActor", "ray::RouterActor", "ray::Supervisor", "tidemill serve")
            assert all(running(name) for name in ours)
            stopped = nodes.run(str(RAY), "job", "stop", job, cluster)
            assert stopped.returncode == 0, stopped.stderr
            eventually(lambda: not running(*ours))
        finally:
            nodes.kill()
