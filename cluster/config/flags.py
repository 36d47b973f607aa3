"""The flags of `tidemill serve` and the configuration keys that they set. Pure.

A flag of a model applies to every model, a flag of workers to every group, and a flag of a role to
its groups; see overrides.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic.fields import FieldInfo

from tidemill.cluster.config.paths import ConfigKey, keys
from tidemill.workers.messages import Role

Scope = Literal[
    "store",
    "edge",
    "cluster",
    "telemetry",
    "model",
    "autoscaling",
    "engine",
    "group",
    "prefill",
    "decode",
    "mixed",
]
ROLES: tuple[Role, ...] = get_args(Role)

_NODES = {
    "model": "models[]",
    "autoscaling": "models[].autoscaling",
    "engine": "models[].engine",
    **dict.fromkeys(("group", *ROLES), "models[].groups[]"),
}
_KEYS = {key.path: key for key in keys()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag: `title` is its section of --help, `text` replaces the key's text there."""

    title: str
    option: str
    scope: Scope
    key: str
    metavar: str | None = None
    text: str | None = None
    short: str | None = None

    @property
    def config_key(self) -> ConfigKey:
        return _KEYS[f"{_NODES.get(self.scope, self.scope)}.{self.key}"]

    @property
    def field(self) -> FieldInfo:
        return self.config_key.field


def _flags(title: str, scope: Scope, metavars: Mapping[str, str | None], prefix: str = "") -> Iterator[Flag]:
    """Yield the flags of keys whose names are those of the flags; `metavars` is by key."""
    for key, metavar in metavars.items():
        option = f"--{prefix}{key}".replace("_", "-")
        yield Flag(title=title, option=option, scope=scope, key=key, metavar=metavar)


def _role_flags() -> Iterator[Flag]:
    texts = {
        "prefill": "number of workers that compute prompts, beside decode workers",
        "decode": "number of workers that generate, beside prefill workers",
        "mixed": "number of workers that do both, instead of prefill and decode workers (1; on CUDA one "
        "for each GPU of this machine)",
    }
    for role in ROLES:
        yield Flag(
            title="workers", option=f"--{role}", scope=role, key="replicas", metavar="N", text=texts[role]
        )
    for role in ROLES:
        text = f"maximum number of {role} workers under load"
        yield Flag(
            title="workers", option=f"--{role}-max", scope=role, key="replicas_max", metavar="N", text=text
        )
    yield Flag(
        title="workers",
        option="--downscale-to-zero-delay",
        scope="autoscaling",
        key="downscale_to_zero_delay_s",
        metavar="SECONDS",
    )


def _rank_flags() -> Iterator[Flag]:
    key = "tensor_parallel_size"
    yield Flag(
        title="workers", option="--tensor-parallel-size", scope="group", key=key, metavar="N", short="-tp"
    )
    yield from _flags("workers", "group", {"tensor_parallel_nodes": "N"})
    for role in ROLES[:2]:
        option, text = f"--{role}-tensor-parallel-size", f"number of ranks of a {role} worker"
        yield Flag(title="workers", option=option, scope=role, key=key, metavar="N", text=text)


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
            "frontends": "N",
            "send_timeout": "SECONDS",
            "shutdown_timeout": "SECONDS",
        },
    ),
    *_flags(
        "model",
        "model",
        {
            "served_model_name": "NAME",
            "revision": "REVISION",
            "download_dir": "FOLDER",
            "max_model_len": "TOKENS",
            "chat_template": "FILE",
            "tool_call_parser": None,
            "reasoning_parser": None,
            "ttft_max": "SECONDS",
            "enable_prefix_caching": None,
            "routers": "N",
        },
    ),
    *_role_flags(),
    *_rank_flags(),
    *_flags(
        "workers",
        "engine",
        {
            "load_format": None,
            "page_size": "TOKENS",
            "compute_dtype": None,
            "kv_cache_dtype": None,
            "state_dtype": None,
            "max_num_seqs": "N",
            "max_num_batched_tokens": "N",
            "itl_target": "TIME",
            "num_speculative_tokens": "N",
            "speculative_method": None,
            "tensor_parallel_reduce": None,
            "tensor_parallel_backend": None,
            "tensor_parallel_one_shot": "SIZE",
            "tensor_parallel_interface": "NAME",
            "allow_inexact_groups": None,
            "enable_expert_parallel": None,
            "overlap": None,
        },
    ),
    *_flags("workers", "group", {"threads": "N|auto"}),
    *_flags("device", "group", {"device": "NAME", "num_gpus": "N"}),
    *_flags(
        "device",
        "engine",
        {
            "kernels": None,
            "backing": None,
            "enforce_eager": None,
            "async_scheduling": None,
            "numa_bind": None,
        },
    ),
    *_flags("memory", "group", {"memory": "SIZE", "memory_floor": "SIZE"}),
    *_flags(
        "memory",
        "engine",
        {
            "gpu_memory_utilization": "PART",
            "memory_broker": None,
            "checkpoint_strategy": None,
            "checkpoint_interval": "TOKENS",
            "checkpoints_per_path": "N",
            "eviction_policy": None,
        },
    ),
    Flag(title="cluster", option="--store", scope="store", key="url", metavar="URL"),
    *_flags("cluster", "store", {"secret_file": "PATH"}, "store-"),
    *_flags("cluster", "cluster", {"ray_address": "ADDRESS", "router_port": "PORT"}),
    *_flags(
        "telemetry",
        "telemetry",
        {"log_level": None, "log_json": None, "otlp_traces_endpoint": "URL", "metrics_alias": None},
    ),
    Flag(
        title="telemetry",
        option="--kv-events-config",
        scope="telemetry",
        key="kv_events",
        metavar="JSON",
        text="publish KV events of every worker: a JSON object with the keys of telemetry.kv_events in "
        "docs/configuration.md, as vLLM has it (off)",
    ),
    *_flags("security", "edge", {"api_keys_file": "PATH", **_PEM}),
    *_flags(_INSIDE, "cluster", {"host": None, **_PEM, "ssl_ca_keyfile": "PATH"}, "cluster-"),
)
_BY_OPTION = {flag.option: flag for flag in FLAGS}


def with_config_paths(message: str, model: int, group: int) -> str:
    """Return a message of an engine, which names flags, with the path in the file before each flag. The
    result is like `models[0].engine.page_size (--page-size)`; `model` and `group` are indices."""
    indexed = {"models[]": f"models[{model}]", "groups[]": f"groups[{group}]"}

    def with_path(match: re.Match[str]) -> str:
        flag = _BY_OPTION.get(match[0])
        if flag is None:
            return match[0]
        parts = [indexed.get(part, part) for part in flag.config_key.path.split(".")]
        return f"{'.'.join(parts)} ({match[0]})"

    return re.sub("--[a-z-]+", with_path, message)
