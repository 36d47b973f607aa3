"""The keys of the configuration file one by one, with their places: `models[].groups[].replicas`. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from tidemill.cluster.config.tree import ConfigNode, RootConfig


@dataclass(frozen=True, slots=True)
class ConfigKey:
    path: str
    owner: type[ConfigNode]
    field: FieldInfo
    is_node: bool  # other keys stand below it

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2].removesuffix("[]")

    @property
    def text(self) -> str:
        """What it means, in one line."""
        assert self.field.description, f"{self.path} is explained in tree.py"
        return " ".join(self.field.description.split())


def keys(node: type[ConfigNode] = RootConfig, place: str = "") -> Iterator[ConfigKey]:
    """All keys below `node`, which is at `place`, each before those below itself."""
    for name, field in node.model_fields.items():
        kind, is_list = kind_of(field.annotation)
        path = f"{place}.{name}".removeprefix(".")
        if isinstance(kind, type) and issubclass(kind, ConfigNode):
            path += "[]" if is_list else ""
            yield ConfigKey(path, node, field, is_node=True)
            yield from keys(kind, path)
        else:
            yield ConfigKey(path, node, field, is_node=False)


def kind_of(annotation: object) -> tuple[object, bool]:
    """The type of a value, None aside, or its Literal; and whether there is a list of them."""
    origin, inner = get_origin(annotation), cast("tuple[object, ...]", get_args(annotation))
    if origin is Annotated:
        return kind_of(inner[0])
    if origin in {Union, UnionType}:
        return kind_of(next(one for one in inner if one is not type(None)))
    if origin is tuple:
        return kind_of(inner[0])[0], True
    return annotation, False


def written(place: Sequence[int | str]) -> str:
    """`models[0].groups[1].replicas`."""
    steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(steps).removeprefix(".")


def general(place: Sequence[int | str]) -> str:
    """The same for every entry of its lists: `models[].groups[].replicas`."""
    return "".join("[]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
