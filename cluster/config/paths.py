"""The keys of the configuration file with their paths, like `models[].groups[].replicas`. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from tidemill.cluster.config.tree import ConfigNode, RootConfig
from tidemill.workers.options import AdapterConfig, EngineConfig, KvEventsConfig

Node = type[AdapterConfig | ConfigNode | EngineConfig | KvEventsConfig]
"""A mapping of the file."""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of the file; `owner` is the mapping that has it."""

    path: str
    owner: Node
    field: FieldInfo
    is_node: bool  # its value is a mapping of other keys, or a list of such

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2].removesuffix("[]")

    @property
    def text(self) -> str:
        """The meaning of the key in one line."""
        assert self.field.description, f"{self.path} has a text below it"
        return " ".join(self.field.description.split())


def keys(node: Node = RootConfig, node_path: str = "") -> Iterator[ConfigKey]:
    """Yield all keys below `node`, each before the keys below itself."""
    for name, field in fields_of(node).items():
        kind, is_list = kind_of(field.annotation)
        path = f"{node_path}.{name}".removeprefix(".")
        if isinstance(kind, type) and hasattr(kind, "__pydantic_fields__"):
            path += "[]" if is_list else ""
            yield ConfigKey(path, node, field, is_node=True)
            yield from keys(cast("Node", kind), path)
        else:
            yield ConfigKey(path, node, field, is_node=False)


def fields_of(node: Node) -> Mapping[str, FieldInfo]:
    """Return the keys of a mapping."""
    return cast("Any", node).__pydantic_fields__


def kind_of(annotation: object) -> tuple[object, bool]:
    """Return the type of a value without None, and whether the annotation is a list of it."""
    origin, inner = get_origin(annotation), cast("tuple[object, ...]", get_args(annotation))
    if origin is Annotated:
        return kind_of(inner[0])
    if origin in {Union, UnionType}:
        return kind_of(next(member for member in inner if member is not type(None)))
    if origin is tuple:
        return kind_of(inner[0])[0], True
    return annotation, False


def format_location(location: Sequence[int | str]) -> str:
    """Return a location in a file as text: `models[0].groups[1].replicas`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def key_path(location: Sequence[int | str]) -> str:
    """Return the path of the key at a location: `models[].groups[].replicas`."""
    parts = ("[]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")
