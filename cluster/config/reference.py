"""The schema of configuration files, and docs/configuration.md.

`tidemill config schema > deploy/config.schema.json`
`python -m tidemill.cluster.config.reference > docs/configuration.md`
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic.json_schema import GenerateJsonSchema

from tidemill.cluster.config.flags import FLAGS
from tidemill.cluster.config.paths import ConfigKey, keys
from tidemill.cluster.config.tree import SIZE, RootConfig

INTRODUCTION = """\
# Configuration

Made from the code by `make config-doc`; a test compares.

One YAML file describes a whole cluster: models, their groups of workers, the store, the endpoint, the Ray
cluster, telemetry.

```yaml
# cluster.yaml: tidemill serve --config cluster.yaml
models:
- model: keeper
  served_model_name: [acme/keeper, keeper]   # replies and metrics carry the first name
  groups:
  - {role: prefill, memory: 512MiB}
  - {role: decode, memory: 256MiB, replicas: 2, replicas_max: 4}
  engine: {max_num_seqs: 32}
- model: keeper
  served_model_name: tiny
  max_model_len: 2048
  groups:
  - {role: mixed, memory: 64MiB}
store:
  url: file:///var/tmp/tidemill?size=2GiB
edge:
  port: 8000
```

```
tidemill config check cluster.yaml             # all that is wrong with it, by place; or what it would start
tidemill config check --offline cluster.yaml   # the file alone, for another machine
tidemill config show cluster.yaml              # the whole tree with its defaults
tidemill config schema                         # its JSON schema, as in deploy/config.schema.json
tidemill serve --config cluster.yaml --port 9000
```

- Flags of `tidemill serve` set the same keys and have the last word. A flag of a model counts for every
  model, one of workers for every group. One of a role counts for its groups, and `--decode 4` adds a group
  where there is none. `MODEL` and `--served-model-name` name one model: a file of several names them itself.
- A key that is not in these tables is an error that names the nearest one that is. A key that stands twice is
  an error, too.
- Several groups may have one role, on other devices or with other memory. `replicas_max` stands in the first
  of them: new workers are like those of that group.
- Memory is lent between workers of one model on one device, up to the sum of their shares. Between models it
  is divided by `memory`.
- No secret stands in the file in clear, but the path of a file that holds it. Relative paths are relative to
  where `tidemill serve` runs.
- A size is written like `512MiB`, `8GiB`, `8GB` (decimal) or `1048576`.
- Editors complete and check a file whose first line is `# yaml-language-server: $schema=` with the path of
  [deploy/config.schema.json](../deploy/config.schema.json). What several keys have to do with each other
  `tidemill config check` alone knows.
"""


class _Untitled(GenerateJsonSchema):
    """Titles would say the names of keys once more."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ANN401 - as pydantic has it
        del schema
        return False


def schema() -> dict[str, Any]:
    found = RootConfig.model_json_schema(schema_generator=_Untitled)
    return {"$schema": GenerateJsonSchema.schema_dialect, **found, "title": "Configuration of Tidemill"}


def reference() -> str:
    found = list(keys())
    defined = schema()["$defs"]
    lines = [INTRODUCTION]
    for parent in dict.fromkeys(key.parent for key in found):
        lines += _table(parent, [key for key in found if key.parent == parent], defined)
    return "\n".join(lines)


def _table(parent: str, found: Sequence[ConfigKey], defined: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {f'`{parent}`' if parent else 'At the top'}\n"
    yield "| key | value | default | flag | meaning |\n|---|---|---|---|---|"
    for key in found:
        flags = ", ".join(f"`{flag.option}`" for flag in FLAGS if flag.explained.path == key.path)
        yield f"| `{key.name}` | {_value(key, defined)} | {_default(key)} | {flags} | {key.text} |"
    yield ""


def _default(key: ConfigKey) -> str:
    default = cast("object", key.field.default)
    if key.field.is_required():
        return "needed"
    if default is None or key.is_node:
        return ""
    return f"`{json.dumps(default)}`"


def _value(key: ConfigKey, defined: Mapping[str, Any]) -> str:
    """What may stand there, as its schema has it."""
    if key.is_node:
        return f"[`{key.path}`](#{key.path.translate(str.maketrans('', '', '[].'))})"
    mine = defined[key.owner.__name__]["properties"][key.name]
    return " or ".join(_kind(one) for one in mine.get("anyOf", [mine]) if one.get("type") != "null")


def _kind(defined: Mapping[str, Any]) -> str:
    match defined:
        case {"anyOf": [*forms]}:
            return " or ".join(map(_kind, forms))
        case {"const": value}:
            return f"`{value}`"
        case {"enum": [*values]}:
            return ", ".join(f"`{value}`" for value in values)
        case {"type": "integer" | "number" as kind}:
            noun = "a whole number" if kind == "integer" else "a number"
            bounds = [
                f"{word} {defined[bound]}"
                for bound, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"))
                if bound in defined
            ]
            return " ".join([noun, *bounds])
        case {"pattern": pattern}:
            return "a size" if pattern == SIZE else "a device"
        case {"type": kind}:
            return {"string": "text", "boolean": "`true`, `false`", "array": "a list of texts"}.get(
                kind, "`name: value` lines"
            )
        case _:
            raise AssertionError(defined)


if __name__ == "__main__":
    sys.stdout.write(reference())
