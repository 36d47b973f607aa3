"""A chat template takes limited time and memory, in its trial and for each chat."""

from contextlib import suppress
from time import monotonic

import psutil
import pytest

from tests.support.cluster.fake_service import KEEPER
from tidemill.cluster.edge.chat import template_process
from tidemill.cluster.edge.chat.template_process import KNOWN, template_of_folder
from tidemill.cluster.edge.chat.templates import Template
from tidemill.cluster.edge.chat.text import Message, Rendering
from tidemill.kvstore.errors import TidemillError
from tidemill.workers import bounded_child
from tidemill.workers.messages import RequestError

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)
GREEDY = [
    LOOPS,
    "{{ 'x' * 10 ** 11 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%*d' % (10 ** 10, 1) }}",
    "{{ lipsum(n=100000000) }}",
    "{% macro again(n) %}{{ again(n + 1) }}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "{{ 'x' | center(100000000000) }}",
    DOUBLED,
]
"""Programs without end, or with more than any memory."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_child, "ANSWER_S_MAX", 2.0)


def children() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if template_process.__name__ in process.cmdline():
                found.append(process)
    return found


@pytest.mark.parametrize("template", GREEDY)
def test_template_that_is_greedy_in_its_trial_is_refused_or_no_worse_than_one_that_refuses(
    template: str,
) -> None:
    """Python itself refuses some of them, which a model that is never asked for chats may have."""
    start_s = monotonic()
    with suppress(TidemillError):
        made = template_of_folder({"default": template}, {})
        with pytest.raises(RequestError):
            made.render([Message("user", "a")], Rendering())
    assert monotonic() - start_s < 20


def test_template_without_end_names_the_fix() -> None:
    with pytest.raises(TidemillError, match=r"5 s or 1 GiB for a short chat: .* --chat-template FILE"):
        template_of_folder({"default": LOOPS}, {})


@pytest.mark.parametrize("greedy", [LOOPS, DOUBLED])
def test_chat_that_makes_a_template_greedy_is_refused_and_the_next_one_is_served(greedy: str) -> None:
    text = f"{{{{ messages[0].content }}}}{{% if messages[0].content == 'go' %}}{greedy}{{% endif %}}"
    made = template_of_folder({"default": text}, {})
    assert not made.is_inline
    with pytest.raises(RequestError, match="chat template") as refused:
        made.render([Message("user", "go")], Rendering())
    assert refused.value.param == "messages"
    assert made.render([Message("user", "é\ud800")], Rendering())[0] == "é\ud800"


def test_what_a_template_writes_and_refuses_is_the_same_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (KEEPER / "chat_template.jinja").read_text()
    inline = template_of_folder({"default": text}, {})
    monkeypatch.setattr(template_process, "KNOWN", frozenset[str]())
    apart = template_of_folder({"default": text}, {})
    assert (inline.is_inline, apart.is_inline) == (True, False)
    assert (inline.source, inline.tried) == (apart.source, apart.tried)
    call = {"function": {"name": "look", "arguments": {"at": "the tower"}}}
    chat = [
        Message("user", "Where?\n\0"),
        Message("assistant", "", {"tool_calls": [call]}),
        Message("user", "é"),
    ]
    for how in (Rendering(), Rendering(tools=[call], tool_marks=(1,), message_marks=[(0, 2)])):
        assert inline.render(chat, how) == apart.render(chat, how)
    for how in (Rendering(chars_max=1), Rendering(options={"messages": []})):
        assert refusal_of(inline, chat, how) == refusal_of(apart, chat, how)


def refusal_of(template: Template, chat: list[Message], how: Rendering) -> tuple[object, ...]:
    with pytest.raises(RequestError) as refused:
        template.render(chat, how)
    error = refused.value
    return str(error), error.param, error.status, error.code


def test_only_templates_that_ship_are_known() -> None:
    assert len(KNOWN) == 1
    assert template_of_folder({"default": (KEEPER / "chat_template.jinja").read_text()}, {}).is_inline
    assert not template_of_folder({"default": "a"}, {}).is_inline


def test_processes_end_with_their_template() -> None:
    before = len(children())
    made = template_of_folder({"default": "a"}, {})
    assert len(children()) == before + 1
    del made
    assert len(children()) == before
