"""The flags of `tidemill serve`, as the keys of the configuration tree declare them. Pure.

A flag of a model applies to every model, a flag of workers to every group, and a flag of a role to
its groups; see overrides.py.
"""

import re
from dataclasses import asdict, dataclass
from typing import get_args

from pydantic.fields import FieldInfo

from tidemill.cluster.config.paths import ConfigKey, keys
from tidemill.workers.messages import Role
from tidemill.workers.options import Flag, Section

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFlag(Flag):
    """A flag with the key of the file that it sets."""

    config_key: ConfigKey

    @property
    def key(self) -> str:
        return self.config_key.name

    @property
    def field(self) -> FieldInfo:
        return self.config_key.field

    @property
    def scope(self) -> str:
        """The role of the groups that the flag sets, or the name of its mapping in the file."""
        return self.role or self.config_key.parent.rpartition(".")[2].removesuffix("s[]")


_DECLARED = [
    KeyFlag(**asdict(flag), config_key=key)
    for key in keys()
    for flag in key.field.metadata
    if isinstance(flag, Flag)
]
FLAGS = tuple(flag for section in get_args(Section) for flag in _DECLARED if flag.section == section)
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
