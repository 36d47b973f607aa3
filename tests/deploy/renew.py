"""Writes what is made: golden files of the examples, and the configuration file's part of values.schema.json.

python -m tests.deploy.renew
"""

import json
from pathlib import Path
from typing import Any, cast

from tests.support.deploy.chart import CHART, EXAMPLES, GOLDEN, ROOT, chart_of, rendered, values_of
from tidemill.cluster.config.tree import RootConfig
from tidemill.cluster.edge.requests.api_keys import ApiKey

SCHEMA = CHART / "values.schema.json"
PARTS = ("ModelConfig", "AutoscalingConfig", "EngineConfig", "TelemetryConfig")
BY_THE_CHART = ("labels", "resources")
"""Of a group: they tie its workers to its pods."""


def golden_file(example: Path) -> Path:
    return GOLDEN / example.name


def golden_text(example: Path) -> str:
    """The dashboard is left out: it has a file and a life of its own."""
    dashboard = (ROOT / "deploy/grafana/tidemill.json").read_text().strip()
    lines = "\n".join(f"    {line}" for line in dashboard.splitlines())
    texts = {
        path: text.replace(lines, "    (deploy/grafana/tidemill.json)")
        for path, text in rendered(chart_of(example), values_of(example)).items()
    }
    parts = [f"# {path}\n{text.strip()}\n" for path, text in texts.items() if text.strip()]
    return "---\n".join(parts)


def schema_text() -> str:
    schema = json.loads(SCHEMA.read_text())
    defined = RootConfig.model_json_schema()["$defs"]
    group = defined["GroupConfig"]
    own = {"name": {"$ref": "#/$defs/GroupName"}, "pod": {"$ref": "#/$defs/Pod"}}
    kept = {name: of for name, of in group["properties"].items() if name not in BY_THE_CHART}
    schema["$defs"] |= {name: defined[name] for name in PARTS}
    schema["$defs"]["Key"] = ApiKey.model_json_schema()
    schema["$defs"]["GroupConfig"] = {
        **group,
        "properties": own | kept,
        "required": [*group["required"], *own],
    }
    model = schema["$defs"]["ModelConfig"]
    model["required"] = ["model", "groups"]
    del model["properties"]["groups"]["default"]
    return json.dumps(_untitled(schema), indent=2) + "\n"


def _untitled(part: Any) -> Any:  # noqa: ANN401 - JSON
    """Without the titles that pydantic makes of names: they would be what errors call a key."""
    if isinstance(part, dict):
        found = cast("dict[str, Any]", part)
        titled = {"title": found["title"]} if "$schema" in found else {}
        return titled | {
            key: _untitled(value) for key, value in found.items() if key != "title" or isinstance(value, dict)
        }
    if isinstance(part, list):
        return [_untitled(one) for one in cast("list[Any]", part)]
    return part


def main() -> None:
    SCHEMA.write_text(schema_text())
    for example in EXAMPLES:
        golden_file(example).write_text(golden_text(example))


if __name__ == "__main__":
    main()
