"""The options of `tidemill serve`, which set keys of its configuration."""

import argparse
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from tidemill.cluster.cli.security import KEY_VARIABLE
from tidemill.cluster.config.flags import FLAGS, Flag
from tidemill.cluster.config.overrides import Given
from tidemill.cluster.config.paths import kind_of
from tidemill.cluster.config.reading import config_of
from tidemill.cluster.config.tree import RootConfig

MARK = "flag "
"""Before the names under which argparse keeps the values of flags."""


def add_serving_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "model", nargs="?", metavar="MODEL", help="a Hugging Face folder, or a bundled model: keeper"
    )
    serve.add_argument(
        "--config",
        "--model-config",
        type=Path,
        metavar="FILE",
        help="YAML that describes the whole cluster, with one model or several: docs/configuration.md; "
        "options given here go first",
    )
    titles = {title: serve.add_argument_group(title) for title in dict.fromkeys(one.title for one in FLAGS)}
    for flag in FLAGS:
        names = [flag.option] if flag.short is None else [flag.option, flag.short]
        titles[flag.title].add_argument(*names, dest=MARK + flag.option, help=help_of(flag), **_shape(flag))
    titles["security"].add_argument(
        "--api-key",  # a key in clear stands in no file
        action="append",
        metavar="KEY",
        help=f"only who brings it may ask, and give orders; several times for several (${KEY_VARIABLE})",
    )


def settled(options: argparse.Namespace) -> RootConfig:
    """What the file of --config, if there is one, and the options say together. Raises ConfigError."""
    values = [Given(flag, getattr(options, MARK + flag.option)) for flag in FLAGS]
    given = [one for one in values if one.value is not None]
    return config_of(options.config, options.model, given)


def help_of(flag: Flag) -> str:
    """With the default of its key, if that says something."""
    if flag.text is not None:
        return flag.text
    default = cast("object", flag.field.default)
    if default is None or isinstance(default, bool):
        return flag.explained.text
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{flag.explained.text} ({shown})"


def _shape(flag: Flag) -> dict[str, Any]:
    """What argparse has to know of the values; bounds are for the configuration to check."""
    kind, is_list = kind_of(flag.field.annotation)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    shape: dict[str, Any] = {"type": kind, "metavar": flag.metavar}
    return {**shape, "nargs": "+"} if is_list else shape
