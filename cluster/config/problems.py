"""Describe the problems of a configuration, one line each with the location and the fix. Pure."""

import reprlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tidemill.cluster.config.paths import format_location, key_path, keys
from tidemill.kvstore.errors import TidemillError

Location = tuple[int | str, ...]

SECRETS = {
    "api_key": "edge.api_keys_file names a file with digests of keys, `tidemill key TENANT` makes an entry",
    "api_keys": "edge.api_keys_file names a file with digests of keys, `tidemill key TENANT` makes an entry",
    "secret": "store.secret_file names a file that has it",
    "store_secret": "store.secret_file names a file that has it",
    "password": "give the path of a file with it to the program that needs it",
    "token": "Ray reads its own from RAY_AUTH_TOKEN or a file, and edge.api_keys_file has keys of clients",
}
"""Likely names of secrets, which are not keys, and how such a secret is given instead."""

RENAMED = {"prefill": "models[].groups[]", "decode": "models[].groups[]", "mixed": "models[].groups[]"} | {
    "store_secret_file": "store.secret_file",
    "cluster_host": "cluster.host",
    "cluster_ssl_certfile": "cluster.ssl_certfile",
    "cluster_ssl_keyfile": "cluster.ssl_keyfile",
    "cluster_ssl_ca_certs": "cluster.ssl_ca_certs",
    "cluster_ssl_ca_keyfile": "cluster.ssl_ca_keyfile",
}
"""Names of flags whose keys have another name, and the paths of these keys."""


FIXES = {
    "missing": "is required",
    "greater_than_equal": "is {given}: set it to {ge} or more",
    "less_than_equal": "is {given}: set it to {le} or less",
    "greater_than": "is {given}: set it above {gt:g}",
    "literal_error": "is {given}: set it to {expected}",
    "string_pattern_mismatch": "is {given}: set it to cpu, cuda, or cuda:1",  # only devices have a pattern
    "string_too_short": "is empty: give it a value, or leave it out",
    "too_short": "is empty: give it a value, or leave it out",
    "too_long": "has {actual_length} entries: the maximum is {max_length}",
}
TYPES = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "string_type": "text, in quotes if it looks like something else",
    "tuple_type": "a list, each entry after a dash",
    "dict_type": "`name: value` lines below it",
    **dict.fromkeys(("model_type", "dataclass_type"), "`name: value` lines below it, or leave it out"),
}


class ConfigError(TidemillError):
    """An invalid configuration; `problems` has a line for each problem."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        """Make the message from the problems; `source` is the path of the file, if there is one."""
        first, *others = problems
        more = f" (and {len(others)} more: tidemill config check {source})" if others and source else ""
        super().__init__((f"{source}: " if source else "") + first + more)
        self.problems = tuple(problems)


def problems_of(error: ValidationError, flags: Mapping[Location, str]) -> list[str]:
    """Return a line for each problem; `flags` has the flag that set the value at a location."""
    errors = error.errors(include_url=False)
    # pydantic also reports a list with invalid entries as too short
    problems = [problem for problem in errors if problem["type"] != "too_short" or not problem["input"]]
    return list(dict.fromkeys(_line(problem, flags) for problem in problems))


def _line(problem: ErrorDetails, flags: Mapping[Location, str]) -> str:
    location, kind = problem["loc"], problem["type"]
    if kind == "invalid_key" or location[-1:] == ("[key]",):
        return f"{format_location(location[:-1])}: write names of keys as text: `name: value`"
    if kind in {"extra_forbidden", "unexpected_keyword_argument"}:
        return f"{format_location(location)}: {_unknown_key(location)}"
    subject = flags.get(location, format_location(location))
    if not subject:
        return "write the keys as `name: value` lines"
    fix = _fix(problem)
    return f"{subject} {fix}" if fix.startswith(("is ", "has ")) else f"{subject}: {fix}"


def _fix(problem: ErrorDetails) -> str:
    """Describe a problem of a known key, with its value and the fix."""
    kind, limits = problem["type"], problem.get("ctx", {})
    given = reprlib.repr(problem["input"])
    if kind == "value_error":
        return str(limits["error"])
    if kind in TYPES:
        is_long = isinstance(problem["input"], (dict, list))
        return f"{'this' if is_long else f'is {given}: it'} takes {TYPES[kind]}"
    return FIXES[kind].format(given=given, **limits) if kind in FIXES else problem["msg"]


def _unknown_key(location: Location) -> str:
    """Suggest the key that an unknown one may have meant, without the value, which may be a secret."""
    name = str(location[-1]).replace("-", "_").lower()
    parent = key_path(location[:-1])
    if name in SECRETS:
        return f"this file takes no secret in clear: {SECRETS[name]}"
    siblings = {key.name: key.name for key in keys() if key.parent == parent}
    others = {key.name: key.path for key in reversed(list(keys()))} | RENAMED
    suggestion = siblings.get(name) or others.get(name)
    for known, similarity_min in ((siblings, 0.6), (others, 0.8)):
        if suggestion is None and (near := get_close_matches(name, known, n=1, cutoff=similarity_min)):
            suggestion = known[near[0]]
    choices = f"the keys here are {', '.join(sorted(siblings))}"
    return f"there is no such key here: {choices if suggestion is None else f'did you mean {suggestion}?'}"
