"""The flags of `tidemill serve`: which key of the configuration each one sets, and how it is set. Pure.

A flag of a model counts for every model, one of workers for every group, one of a role for its groups:
`overrides.py`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic.fields import FieldInfo

from tidemill.cluster.config.paths import ConfigKey, keys
from tidemill.workers.messages import Role

Scope = Literal[
    "store", "edge", "cluster", "telemetry", "model", "engine", "group", "prefill", "decode", "mixed"
]
ROLES: tuple[Role, ...] = get_args(Role)

_NODES = {"model": "models[]", "engine": "models[].engine"} | dict.fromkeys(
    ("group", *ROLES), "models[].groups[]"
)
_KEYS = {key.path: key for key in keys()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """`title` is the part of --help where it stands, `text` what is said there instead of the key's."""

    title: str
    option: str
    scope: Scope
    key: str
    metavar: str | None = None
    text: str | None = None
    short: str | None = None

    @property
    def explained(self) -> ConfigKey:
        return _KEYS[f"{_NODES.get(self.scope, self.scope)}.{self.key}"]

    @property
    def field(self) -> FieldInfo:
        return self.explained.field


def _flags(title: str, scope: Scope, rows: Mapping[str, str | None], prefix: str = "") -> Iterator[Flag]:
    """Of keys that are called like their flags; `rows` has the metavar of each key."""
    for key, metavar in rows.items():
        option = f"--{prefix}{key}".replace("_", "-")
        yield Flag(title=title, option=option, scope=scope, key=key, metavar=metavar)


def _of_roles() -> Iterator[Flag]:
    does = {
        "prefill": "workers that compute prompts (1)",
        "decode": "workers that generate (1)",
        "mixed": "workers that do both, instead of these two",
    }
    for role in ROLES:
        yield Flag(
            title="workers", option=f"--{role}", scope=role, key="replicas", metavar="N", text=does[role]
        )
    for role in ROLES:
        text = f"more {role} workers are started under load, up to so many in all"
        yield Flag(
            title="workers", option=f"--{role}-max", scope=role, key="replicas_max", metavar="N", text=text
        )


def _of_ranks() -> Iterator[Flag]:
    key = "tensor_parallel_size"
    yield Flag(
        title="workers", option="--tensor-parallel-size", scope="group", key=key, metavar="N", short="-tp"
    )
    for role in ROLES[:2]:
        text = f"the same, of {role} workers alone"
        yield Flag(
            title="workers",
            option=f"--{role}-tensor-parallel-size",
            scope=role,
            key=key,
            metavar="N",
            text=text,
        )


_PEM = {"ssl_certfile": "PATH", "ssl_keyfile": "PATH", "ssl_ca_certs": "PATH"}
_INSIDE = "security between the cluster's processes"

FLAGS: tuple[Flag, ...] = (
    *_flags(
        "endpoint",
        "edge",
        {
            "host": "ADDRESS",
            "port": "PORT",
            "grpc_port": "PORT",
            "send_timeout": "SECONDS",
            "shutdown_timeout": "SECONDS",
        },
    ),
    *_flags(
        "model",
        "model",
        {
            "served_model_name": "NAME",
            "max_model_len": "TOKENS",
            "chat_template": "FILE",
            "tool_call_parser": None,
            "reasoning_parser": None,
            "ttft_max": "SECONDS",
            "routers": "N",
        },
    ),
    *_of_roles(),
    *_of_ranks(),
    *_flags(
        "workers",
        "engine",
        {
            "page_size": "TOKENS",
            "kv_cache_dtype": None,
            "max_num_seqs": "N",
            "max_num_batched_tokens": "N",
            "num_speculative_tokens": "N",
            "speculative_method": None,
            "overlap": None,
        },
    ),
    *_flags("workers", "group", {"threads": "N"}),
    *_flags("device", "group", {"device": "NAME"}),
    *_flags("device", "engine", {"kernels": None, "backing": None, "enforce_eager": None}),
    *_flags("memory", "group", {"memory": "SIZE", "memory_floor": "SIZE"}),
    *_flags(
        "memory",
        "engine",
        {
            "memory_broker": None,
            "checkpoint_strategy": None,
            "checkpoint_interval": "TOKENS",
            "checkpoints_per_path": "N",
            "eviction_policy": None,
        },
    ),
    Flag(title="cluster", option="--store", scope="store", key="url", metavar="URL"),
    *_flags("cluster", "store", {"secret_file": "PATH"}, "store-"),
    *_flags("cluster", "cluster", {"ray_address": "ADDRESS"}),
    *_flags(
        "telemetry",
        "telemetry",
        {"log_level": None, "log_json": None, "otlp_traces_endpoint": "URL", "metrics_alias": None},
    ),
    *_flags("security", "edge", {"api_keys_file": "PATH", **_PEM}),
    *_flags(_INSIDE, "cluster", {"host": None, **_PEM}, "cluster-"),
)
_BY_OPTION = {flag.option: flag for flag in FLAGS}


def with_places(message: str, model: int, group: int) -> str:
    """A message of an engine, which knows its settings as flags, with the key of the file beside each flag:
    `models[0].engine.page_size (--page-size)`. `model` and `group` are their numbers."""
    at = {"models[]": f"models[{model}]", "groups[]": f"groups[{group}]"}

    def place(found: re.Match[str]) -> str:
        flag = _BY_OPTION.get(found[0])
        if flag is None:
            return found[0]
        parts = [at.get(part, part) for part in flag.explained.path.split(".")]
        return f"{'.'.join(parts)} ({found[0]})"

    return re.sub("--[a-z-]+", place, message)
