"""Renders chat templates of Hugging Face folders in a sandbox, with everything that transformers offers to
them.

A template is a Jinja program that came with the model. It sees `messages`, `tools`, `documents`,
`add_generation_prompt`, the model's special tokens and the variables of the request: plain JSON data.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

RESERVED = frozenset(
    [
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "kwargs",
        "self",
    ]
)
"""Variables that a request cannot set: they determine what is rendered, or how."""

CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message, to find it in the rendered text."""


class _Generation(Extension):
    """Accepts `{% generation %}`, which marks answers in training data, and changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """A namespace without names that start with an underscore, which lead to Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # noqa: ANN401
        own, *given = args
        values = dict(*given, **attributes)
        for name in values:
            _check_public(name)
        Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot set {name!r} on a namespace")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the local date, as transformers has it


class JinjaTemplate:
    """One template with the special tokens that it may name. Rendering raises what the template raises."""

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        shared = {"raise_exception": _refuse, "strftime_now": _strftime_now, "namespace": _PublicNamespace}
        self._template = environment.from_string(text, shared)
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Return the prompt of a chat. With `continue_final_message` it ends where the last message's
        content ends.

        A message's None fields are left out, and its reasoning is also available as `thinking`, which the
        templates of gpt-oss read. Raises ValueError for a last message that cannot be continued.
        """
        shown = [_shown(message) for message in messages]
        last = ""
        if continue_final_message:
            last = shown[-1].get("content")
            if not isinstance(last, str):
                raise ValueError("the last message has no content to go on with")
            shown[-1] |= {"content": last + CUT}
        rendered = self._template.render(
            {
                **self._special_tokens,
                **variables,
                "messages": shown,
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut(rendered, last) if continue_final_message else rendered


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = fields.get("reasoning_content")
    return fields if reasoning is None else {"thinking": reasoning, **fields}


def _cut(rendered: str, last: str) -> str:
    """Return the text before the mark, also where a template has trimmed the space behind it."""
    end = rendered.rfind(CUT.strip())
    if end < 0 or last.strip() not in rendered:
        raise ValueError("the template does not show the last message as it is, so it cannot be continued")
    return rendered[:end] if rendered.startswith(CUT, end) else rendered[:end].rstrip()
