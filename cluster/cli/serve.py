"""The options of `tidemill serve`, which set keys of its configuration."""

import argparse
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from tidemill.cluster.cli.security import KEY_VARIABLE
from tidemill.cluster.config.flags import FLAGS, Flag
from tidemill.cluster.config.fleets import with_visible_gpus
from tidemill.cluster.config.overrides import GivenFlag
from tidemill.cluster.config.paths import kind_of
from tidemill.cluster.config.reading import load_config
from tidemill.cluster.config.tree import RootConfig

TEXTS = {"TIME", "N|auto", "JSON"}
"""The metavars of flags whose values the configuration reads from text."""

MARK = "flag "
"""The prefix of the names under which argparse stores the values of flags."""


def add_serving_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "model", nargs="?", metavar="MODEL", help="a Hugging Face folder, or a bundled model: keeper"
    )
    serve.add_argument(
        "--config",
        "--model-config",
        type=Path,
        metavar="FILE",
        help="a YAML file that describes the cluster, see docs/configuration.md; other flags override it",
    )
    titles = {title: serve.add_argument_group(title) for title in dict.fromkeys(flag.title for flag in FLAGS)}
    for flag in FLAGS:
        names = [flag.option] if flag.short is None else [flag.option, flag.short]
        titles[flag.title].add_argument(*names, dest=MARK + flag.option, help=help_of(flag), **_shape(flag))
    titles["security"].add_argument(
        "--api-key",  # not a configuration key, because no file has a key in clear
        action="append",
        metavar="KEY",
        help=f"require this API key, an operator's, of clients; can be repeated (${KEY_VARIABLE})",
    )


def config_of_options(options: argparse.Namespace) -> RootConfig:
    """Return the configuration of the --config file, if there is one, and the flags, with a worker for each
    GPU of this machine where it has no number. Raises ConfigError."""
    values = [GivenFlag(flag, getattr(options, MARK + flag.option)) for flag in FLAGS]
    given = [value for value in values if value.value is not None]
    return with_visible_gpus(load_config(options.config, options.model, given), count_gpus)


def count_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    from tidemill.workers.device import count_gpus  # noqa: PLC0415 - torch, for CUDA alone

    return count_gpus()


def help_of(flag: Flag) -> str:
    """Return the help of a flag, with its default if there is one that is not a switch."""
    if flag.text is not None:
        return flag.text
    default = cast("object", flag.field.default)
    if default is None or isinstance(default, bool):
        return flag.config_key.text
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{flag.config_key.text} ({shown})"


def _shape(flag: Flag) -> dict[str, Any]:
    """Return the arguments of `add_argument` for the value; the configuration checks bounds."""
    kind, is_list = kind_of(flag.field.annotation)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    kind = str if flag.metavar in TEXTS else kind
    shape: dict[str, Any] = {"type": kind, "metavar": flag.metavar}
    return {**shape, "nargs": "+"} if is_list else shape
