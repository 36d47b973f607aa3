"""Settings that Ray pickles for the restart of an actor, which another version of the code may restore."""

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import ClassVar


class PickledByName:
    """A dataclass whose pickle has its fields by name. A field that the pickle lacks gets its default, and
    one that this version does not know is left out."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return restore, (type(self), {field.name: getattr(self, field.name) for field in fields(self)})


def restore(kind: type[PickledByName], values: Mapping[str, object]) -> PickledByName:
    """Return settings of what was pickled. Raises TypeError if a field without a default is missing."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})
