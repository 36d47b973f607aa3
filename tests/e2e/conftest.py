"""The shared fixtures of this folder: a server of keeper, and calls without faults."""

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.e2e.faults import run
from tests.support.e2e.history import Ask, Call, broken
from tests.support.e2e.server import Server
from tidemill.workers.sources.names import bundled

TEMPLATE = """{% for tool in tools or [] %}<|system|> {{ tool | tojson }}<|end|>
{% endfor %}{% for m in messages %}
{%- set role = 'user' if m.role == 'tool' else m.role %}<|{{ role }}|> {{ (m.content or '') | trim }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
"""keeper's own template for chats without tools; a grammar makes keeper, which never saw a tool, call one."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `server`: its log, and its page store in `store`."""
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    """One prefill and two decode workers of keeper, with a chat template that knows tools.

    Ctrl-C stops it, SIGTERM stops the servers of other modules; neither may leave a process.
    """
    model = shutil.copytree(bundled()["keeper"], folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    named = [str(model), "--served-model-name", "keeper", "--port", "0"]
    sized = ["--prefill", "1", "--decode", "2", "--memory", "64MiB"]
    store = ["--store", f"file://{folder / 'store'}?size=1GiB"]
    with Server([*named, *sized, *store], folder / "log") as server:
        yield server
        assert server.stop(signal.SIGINT) == 0


@pytest.fixture(scope="module")
def calm(server: Server, asked: list[Ask]) -> list[Call]:
    """The calls of a module without faults."""
    calls = asyncio.run(run(server, asked, "calm")).calls
    assert [broken(call, call) for call in calls] == [[] for _ in calls]
    return calls
