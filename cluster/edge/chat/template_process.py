"""Render chat templates in child processes, which the kernel kills when they reach a limit.

python -m tidemill.cluster.edge.chat.template_process    renders what it reads from its standard input

A template is a program that came with a model. The sandbox of Jinja hides Python from it, and bounds neither
its time nor its memory. Only templates that Tidemill ships are rendered in the edge itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from hashlib import sha256
from typing import Any

from tidemill.cluster.edge.chat.jinja_template import RESERVED, JinjaTemplate
from tidemill.cluster.edge.chat.templates import Render, Template, Turns, careful, inline_template
from tidemill.cluster.edge.chat.text import Message, Rendering
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.bounded_child import MEMORY_BYTES, BoundedChild, answer_questions, head_of_parent
from tidemill.workers.messages import RequestError

RENDER_S_MAX = 5.0
"""The CPU time of one chat: of its prompt, and of those beside it that show where later chats leave it."""

LIMITS = f"{RENDER_S_MAX:g} s or {MEMORY_BYTES >> 30} GiB"

KNOWN = frozenset({"54dc437eb4d0711a8d60a87c0ddfe4ac7e20d5205d4f14da02538353651d918c"})
"""The SHA-256 of templates that ship with Tidemill."""

_FIELDS = tuple(field.name for field in fields(Rendering))


def template_of_folder(texts: Mapping[str, str], special: Mapping[str, str]) -> Template:
    """Return the template of a model with these texts by name and these special tokens. Raises TidemillError
    when it reaches the limits in a trial."""
    source = "".join(texts.values())
    if {sha256(text.encode()).hexdigest() for text in texts.values()} <= KNOWN:
        return inline_template(source, _renderer(texts, special))
    processes = _Processes(texts, special)
    tried = processes.ask(None)
    if tried is None:
        raise TidemillError(
            f"the model's chat template takes more than {LIMITS} for a short chat: give another one by "
            "--chat-template FILE"
        )
    return Template(source=source, tried=tried, render=careful(processes.render), is_inline=False)


class _Processes:
    """The child processes of one template, one for each thread that renders concurrently."""

    def __init__(self, texts: Mapping[str, str], special: Mapping[str, str]) -> None:
        self._new = partial(BoundedChild, "tidemill.cluster.edge.chat.template_process", [texts, special])
        self._idle: list[BoundedChild] = []

    def ask(self, question: object) -> Any:  # noqa: ANN401 - JSON
        try:
            child = self._idle.pop()
        except IndexError:
            child = self._new()
        answer = child.ask(question)
        self._idle.append(child)
        return answer

    def render(self, messages: Sequence[Message], how: Rendering) -> tuple[str, list[int]]:
        turns = [(message.role, message.content, message.more) for message in messages]
        match self.ask([turns, {name: getattr(how, name) for name in _FIELDS}]):
            case {"text": text, "ends": ends}:
                return text, ends
            case {"refusal": refusal, **more}:
                raise RequestError(refusal, **more)
            case _:
                raise RequestError(
                    f"the model's chat template takes more than {LIMITS} for these messages: send fewer",
                    param="messages",
                )


def _renderer(texts: Mapping[str, str], special: Mapping[str, str]) -> Render:
    @cache
    def compiled(name: str) -> JinjaTemplate:
        return JinjaTemplate(texts.get(name, texts["default"]), special)

    def render(turns: Turns, how: Rendering) -> str:
        return compiled("tool_use" if how.tools else "default").render(
            turns,
            how.tools,
            checked_options(how.options),
            add_generation_prompt=how.answers,
            continue_final_message=how.continues,
        )

    return render


def checked_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the template variables of a client. Those that determine how a template runs are refused. Raises
    RequestError."""
    taken = next((name for name in options if name in RESERVED), None)
    if taken is not None:
        raise RequestError(
            f"chat_template_kwargs: {taken} is not a variable of the template: leave it out",
            param="chat_template_kwargs",
        )
    return options


def main() -> None:
    texts, special = head_of_parent()
    made = cache(lambda: inline_template("", _renderer(texts, special)))

    def answer(question: Any) -> object:  # noqa: ANN401 - JSON
        if question is None:
            return made().tried
        turns, how = question
        try:
            text, ends = made().render([Message(*turn) for turn in turns], Rendering(**how))
        except RequestError as error:
            return {"refusal": str(error), "param": error.param, "status": error.status, "code": error.code}
        return {"text": text, "ends": ends}

    answer_questions(answer, RENDER_S_MAX)


if __name__ == "__main__":
    main()
