"""What is wrong with a configuration: one line for each thing, with its place and the fix. Pure."""

import reprlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tidemill.cluster.config.paths import general, keys, written
from tidemill.kvstore.errors import TidemillError

Place = tuple[int | str, ...]

IN_CLEAR = {
    "api_key": "edge.api_keys_file names a file with digests of keys, `tidemill key TENANT` makes an entry",
    "api_keys": "edge.api_keys_file names a file with digests of keys, `tidemill key TENANT` makes an entry",
    "secret": "store.secret_file names a file that holds it",
    "store_secret": "store.secret_file names a file that holds it",
    "password": "give it to what asks for it by a file",
    "token": "Ray finds its own in RAY_AUTH_TOKEN or a file, and keys of clients stand in edge.api_keys_file",
}
"""Keys that somebody may expect, and where such a thing belongs."""

ELSEWHERE = {"prefill": "models[].groups[]", "decode": "models[].groups[]", "mixed": "models[].groups[]"} | {
    "store_secret_file": "store.secret_file",
    "cluster_host": "cluster.host",
    "cluster_ssl_certfile": "cluster.ssl_certfile",
    "cluster_ssl_keyfile": "cluster.ssl_keyfile",
    "cluster_ssl_ca_certs": "cluster.ssl_ca_certs",
}
"""Names of flags, where the key is called otherwise."""


FIXES = {
    "missing": "is needed",
    "greater_than_equal": "is {given}: set it to {ge} or more",
    "less_than_equal": "is {given}: set it to {le} or less",
    "greater_than": "is {given}: set it above {gt:g}",
    "literal_error": "is {given}: set it to {expected}",
    "string_pattern_mismatch": "is {given}: set it to cpu, cuda, or cuda:1",  # devices alone have a pattern
    "string_too_short": "is empty: give it a value, or leave it out",
    "too_short": "is empty: give it a value, or leave it out",
    "too_long": "has {actual_length} entries: {max_length} are the most",
}
TYPES = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "string_type": "text, in quotes if it looks like something else",
    "tuple_type": "a list, each entry after a dash",
    "dict_type": "`name: value` lines below it",
    "model_type": "`name: value` lines below it, or leave it out",
}


class ConfigError(TidemillError):
    """A configuration that cannot be; `problems` has a line for each thing that is wrong with it."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        """`source`: the file, if there is one."""
        first, *others = problems
        more = f" (and {len(others)} more: tidemill config check {source})" if others and source else ""
        super().__init__((f"{source}: " if source else "") + first + more)
        self.problems = tuple(problems)


def problems_of(error: ValidationError, flags: Mapping[Place, str]) -> list[str]:
    """`flags`: where a flag has set what is there, its name, for which the place is known."""
    found = error.errors(include_url=False)
    # a list whose entries are wrong is told to be too short, too
    told = [problem for problem in found if problem["type"] != "too_short" or not problem["input"]]
    return list(dict.fromkeys(_line(problem, flags) for problem in told))


def _line(problem: ErrorDetails, flags: Mapping[Place, str]) -> str:
    place, kind = problem["loc"], problem["type"]
    if kind == "invalid_key" or place[-1:] == ("[key]",):
        return f"{written(place[:-1])}: write names of keys as text: `name: value`"
    if kind == "extra_forbidden":
        return f"{written(place)}: {_unknown(place)}"
    where = flags.get(place, written(place))
    if not where:
        return "write the keys as `name: value` lines"
    fix = _fix(problem)
    return f"{where} {fix}" if fix.startswith(("is ", "has ")) else f"{where}: {fix}"


def _fix(problem: ErrorDetails) -> str:
    """Values of keys are shown, those of unknown keys never: they may be secrets."""
    kind, limits = problem["type"], problem.get("ctx", {})
    given = reprlib.repr(problem["input"])
    if kind == "value_error":
        return str(limits["error"])
    if kind in TYPES:
        is_long = isinstance(problem["input"], dict | list)
        return f"{'this' if is_long else f'is {given}: it'} takes {TYPES[kind]}"
    return FIXES[kind].format(given=given, **limits) if kind in FIXES else problem["msg"]


def _unknown(place: Place) -> str:
    """What a key that does not exist may have meant."""
    name = str(place[-1]).replace("-", "_").lower()
    parent = general(place[:-1])
    if name in IN_CLEAR:
        return f"no secret stands in this file in clear: {IN_CLEAR[name]}"
    here = {key.name: key.name for key in keys() if key.parent == parent}
    there = {key.name: key.path for key in reversed(list(keys()))} | ELSEWHERE
    meant = here.get(name) or there.get(name)
    for known, likeness in ((here, 0.6), (there, 0.8)):
        if meant is None and (near := get_close_matches(name, known, n=1, cutoff=likeness)):
            meant = known[near[0]]
    advice = f"{', '.join(sorted(here))} may stand here" if meant is None else f"did you mean {meant}?"
    return f"there is no such key here: {advice}"
