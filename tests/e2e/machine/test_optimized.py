"""A server under `python -O`, which drops assertions, refuses the same bodies with the same words.

Its workers log that they check no owners of memory. No child has the API key in its environment.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.e2e.server import NO_TLS, Server

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": [70] * 9000}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": [1 << 40]}),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 65}),
    (COMPLETIONS, {"prompt": "a", "n": 0}),
    (COMPLETIONS, {"prompt": "a", "n": 17}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"99999": 1}}),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "("}}),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "a" * 5000}}),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"type": "nothing"}}}),
    (COMPLETIONS, {"prompt": "a", "cache_breakpoints": [7]}),
    (CHATS, {"messages": []}),
    (CHATS, {"messages": [{"role": "king", "content": "a"}]}),
    (CHATS, {"messages": [USER], "tools": [{"type": "function"}]}),
    (CHATS, {"messages": [USER], "chat_template_kwargs": {"messages": []}}),
    (CHATS, {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True}),
    ("/v1/responses", {"input": [], "previous_response_id": "r"}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [-1]}),
)
KEY = "sk-of-the-operator"
UNCHECKED = "this worker does not check the owners of its memory"
ASKED = {"model": "keeper", "prompt": "Emma is in the", "max_tokens": 24, "temperature": 0}


def answers(server: Server) -> list[tuple[int, Any]]:
    bearer = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, timeout=60, verify=NO_TLS, headers=bearer) as client:
        refused = [client.post(path, json={"model": "keeper", **body}) for path, body in BODIES]
        known = client.post(COMPLETIONS, json=ASKED)
    assert known.status_code == 200, known.text
    return [
        *((reply.status_code, reply.json()["error"]) for reply in refused),
        (200, known.json()["choices"]),
    ]


@pytest.mark.slow
def test_server_without_assertions_refuses_alike(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # each process would compile all of torch
    monkeypatch.setenv("TIDEMILL_API_KEY", KEY)
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    options = ["keeper", "--port", "0", "--mixed", "1", "--memory", "64MiB"]
    with Server(options, tmp_path / "log") as optimized:
        found = answers(optimized)
        frontend, *children = optimized.processes()
        assert KEY in frontend.environ().values()
        assert not [child for child in children if KEY in child.environ().values()]
        assert UNCHECKED in optimized.log()
    assert UNCHECKED not in server.log()
    assert found == answers(server)
    assert all(400 <= status < 500 for status, _ in found[:-1]), [status for status, _ in found]
