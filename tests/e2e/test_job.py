"""`ray job submit` starts a server on a Ray cluster of two nodes that others started, with tokens."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.e2e.nodes import HEAD, NET, RAY, Nodes
from tests.support.e2e.server import command_of, eventually

pytestmark = pytest.mark.slow

JOB = Path(__file__).parents[2] / "deploy" / "job.yaml"
SECOND = f"{NET}.3"
TIDEMILL = Path(sys.executable).parent / "tidemill"

CLIENT = """
import sys
from ray.job_submission import JobSubmissionClient

url, call, *arguments = sys.argv[1:]
client = JobSubmissionClient(url)
if call == "submit":
    folder, command = arguments
    print(client.submit_job(entrypoint=command, runtime_env={"working_dir": folder}))
else:
    print(client.stop_job(*arguments))
"""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="job-") as folder:  # a short path, for Ray's sockets
        nodes = Nodes(Path(folder), dashboard=True)
        try:
            nodes.add(SECOND)
            yield nodes
        finally:
            nodes.kill()


def test_ray_job_serves_until_it_is_stopped(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.read_text())
    command = (str(TIDEMILL), "serve", "--config", "job.yaml", "--port", "0", "--memory", "32MiB")
    job = nodes.submit(tmp_path, *command)
    url = nodes.job_url(job)
    body = {"model": "keeper", "prompt": [5] * 200, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"]["prefilled_tokens"] == 192
    assert len(nodes.actors()) == 3, "a router and two workers"

    stranger = nodes.run(str(RAY), "job", "stop", job, "--address", nodes.url, RAY_AUTH_TOKEN="0" * 32)
    assert stranger.returncode != 0
    stopped = nodes.run(sys.executable, "-c", CLIENT, nodes.url, "stop", job)
    assert stopped.stdout.strip() == "True", stopped.stderr
    eventually(lambda: not nodes.actors() and not supervisors(nodes))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    for host in (HEAD, SECOND):
        lines = [command_of(process) for process in nodes.processes(host)]
        assert any("/raylet/raylet" in line for line in lines), "the cluster belongs to another user"
    check_the_lease(nodes, tmp_path, command)


def supervisors(nodes: Nodes) -> list[psutil.Process]:
    return [process for process in nodes.processes() if "ray::Supervisor" in command_of(process)]


def check_the_lease(nodes: Nodes, folder: Path, command: Sequence[str]) -> None:
    """Kill -9 of the server, then of its supervisor while that ends the cluster: the next one goes on. Ray's
    Python client has submitted this job, which finds its files as well."""
    ended = nodes.run(sys.executable, "-c", CLIENT, nodes.url, "submit", str(folder), " ".join(command))
    assert ended.returncode == 0, ended.stderr
    nodes.job_url(ended.stdout.strip().splitlines()[-1])
    assert (len(nodes.actors()), len(supervisors(nodes))) == (3, 1)
    for process in nodes.processes():
        if "tidemill serve" in command_of(process) and "python" in command_of(process):
            process.kill()
    eventually(lambda: len(nodes.actors()) < 3)
    for process in supervisors(nodes):
        process.kill()
    eventually(lambda: not nodes.actors() and not supervisors(nodes))
