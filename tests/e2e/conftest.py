"""The shared fixtures of this folder: a server of keeper, and calls without faults."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.e2e.faults import run
from tests.support.e2e.history import Ask, Call, broken
from tests.support.e2e.server import SHARES_SERVER, Server
from tidemill.workers.sources.names import bundled

TEMPLATE = """{% for tool in tools or [] %}<|system|> {{ tool | tojson }}<|end|>
{% endfor %}{% for m in messages %}
{%- set role = 'user' if m.role == 'tool' else m.role %}<|{{ role }}|> {{ (m.content or '') | trim }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
"""keeper's own template for chats without tools; a grammar makes keeper, which never saw a tool, call one."""


ENDS = pytest.StashKey[ExitStack]()
"""The end of `server`."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `server`: its log, and its page store in `store`."""
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="session")
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """One prefill and two decode workers of keeper, with a chat template that knows tools.

    Ctrl-C stops it, SIGTERM stops the servers of other modules; neither may leave a process.
    """
    model = shutil.copytree(bundled()["keeper"], folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    named = [str(model), "--served-model-name", "keeper", "--port", "0"]
    sized = ["--prefill", "1", "--decode", "2", "--memory", "64MiB"]
    store = ["--store", f"file://{folder / 'store'}?size=1GiB"]

    def end(server: Server) -> None:
        assert server.stop(signal.SIGINT) == 0

    with ExitStack() as ends:
        server = ends.enter_context(Server([*named, *sized, *store], folder / "log"))
        ends.callback(end, server)
        request.config.stash[ENDS] = ends
        yield server


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End `server` after the last test that uses it: without requests it takes a quarter of a core. A process
    of xdist runs these tests one after the other."""
    uses = [each is not None and each.nodeid.partition("::")[0] in SHARES_SERVER for each in (item, nextitem)]
    if "PYTEST_XDIST_WORKER" in os.environ and uses == [True, False]:
        item.config.stash.get(ENDS, ExitStack()).close()


@pytest.fixture(scope="module")
def calm(server: Server, asked: list[Ask]) -> list[Call]:
    """The calls of a module without faults."""
    calls = asyncio.run(run(server, asked, "calm")).calls
    assert [broken(call, call) for call in calls] == [[] for _ in calls]
    return calls
