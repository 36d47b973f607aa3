"""`tidemill why`: send the prompts of a file one after another, and explain the last one's misses."""

import argparse
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.text import Text

from tidemill.cluster.cli.fleet import CommandContext, show
from tidemill.cluster.cli.options.arguments import UsageError
from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.status import ask_server

ENDPOINTS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
"""The endpoint of a body that has this field."""

ONE_TOKEN = {"/v1/responses": {"max_output_tokens": 1}}
DROPPED = ("max_completion_tokens", "stream_options")

HEADERS = {"x-cache-diagnostics": "text"}
TIMEOUT_S = 600.0
ANNOUNCED_S = 2.0
"""The time in which workers have announced to the routers what a prompt has left."""

SALT_BYTES = 8

Usage = dict[str, Any]

REASONS = {
    "store_down": "the store that may have them does not answer",
    "store_slow": "the store had them, and they came too late",
    "fetch_failed": "the store had them, but an object was missing or damaged",
    "other_worker": "another worker can restore them, and the store does not have them",
    "evicted": "they were evicted",
    "expired": "they were evicted after the time for which they were retained",
    "no_checkpoint": "their pages are in memory, but this model resumes only at a checkpoint",
    "not_held": "an earlier prompt had them, and no worker can restore them now",
    "other_salt": "they are cached under another cache_salt, or from before a reset",
    "other_text": "an earlier prompt went on otherwise",
    "never_seen": "no earlier prompt went on like this",
    "prompt_logprobs": "logprobs of the prompt must be computed",
    "last_page": "the last page of a prompt is always computed",
    "unknown": "the worker does not report why",
}


def why(options: argparse.Namespace, server: ServerAddress, context: CommandContext) -> int:
    """Send the prompts and print the sentences. Raises UsageError, Unserved, RequestError."""
    usage = ask_all(server, read_prompts(options.file, options.endpoint), context.sleep)
    show(options, usage, Text("\n".join(sentences(usage))))
    return 0


def read_prompts(file: Path, endpoint: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Return the path and the body of each request in a file. Raises UsageError."""
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: give JSON Lines, a prompt in each ({error})") from None
    if len(lines) < 2:
        raise UsageError(f"{file} has {len(lines)} prompts: give two, of which the last one is explained")
    return [_request_of(line, number, endpoint) for number, line in enumerate(lines, start=1)]


def _request_of(line: object, number: int, endpoint: str | None) -> tuple[str, dict[str, Any]]:
    body = {"prompt": line} if isinstance(line, str) else line
    if not isinstance(body, dict):
        raise UsageError(f"line {number} is neither a text nor the body of a request")
    found = cast("dict[str, Any]", body)
    path = endpoint or next((ENDPOINTS[field] for field in ENDPOINTS if field in found), None)
    if path is None:
        raise UsageError(f"line {number} has none of the fields {', '.join(ENDPOINTS)}: give --endpoint")
    kept = {name: value for name, value in found.items() if name not in DROPPED}
    return path, {**kept, "stream": False, **ONE_TOKEN.get(path, {"max_tokens": 1})}


def ask_all(
    server: ServerAddress, prompts: Sequence[tuple[str, dict[str, Any]]], sleep: Callable[[float], None]
) -> Usage:
    """Send all requests and return the usage of the last. Without an API key they get a salt of their own, so
    that their texts are compared token by token."""
    salt = {} if server.api_key else {"cache_salt": f"why-{secrets.token_hex(SALT_BYTES)}"}
    usage: Usage = {}
    for number, (path, body) in enumerate(prompts):
        if number:
            sleep(ANNOUNCED_S)
        salted = body if "extra_key" in body else {**salt, **body}
        reply = ask_server(server, "POST", path, "usage", salted, headers=HEADERS, timeout_s=TIMEOUT_S)
        usage = reply["usage"]
    return usage


def sentences(usage: Usage) -> Iterator[str]:
    """Yield why tokens of a prompt were computed, in plain English."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    if not details.get("cache_diagnostics"):
        yield "The server does not explain its cache: it is an earlier version, or no Tidemill server."
        return
    found = details["cache_diagnostics"][-1]
    misses = found["misses"]
    end = max((miss["end"] for miss in misses), default=found["restored_tokens"])
    yield (
        f"The last prompt has {end:,} tokens. {found['restored_tokens']:,} were restored, and pages of "
        f"{found['matched_tokens']:,} were in memory."
    )
    for miss in misses:
        yield f"  {miss['start']:,} to {miss['end']:,}: {_because(miss)} ({miss['seconds']:.3g} s)"
        if "text" in miss:
            before, after = miss["text"]
            yield f"      the same until  {before!r}"
            yield f"      then here       {after!r}"
    missed = found["cache_missed_tokens"]
    if missed:
        yield f"{missed:,} of these tokens could have been cached."
    else:
        yield "Nothing was computed that could have been cached."


def _because(miss: Mapping[str, Any]) -> str:
    text = REASONS.get(miss["reason"], "the reason is of a newer version")
    if "ago_s" in miss:
        by = {"own": ", for a request of the same tenant", "another": ", for a request of another tenant"}
        text += f" {miss['ago_s']:.0f} s ago for memory of {miss['memory_for']}"
        text += by.get(miss["requested_by"], "")
    if "differs_at" in miss:
        first, last = miss["differs_at"]
        text += f" at token {first:,}" if first == last else f" between the tokens {first:,} and {last:,}"
    return text
