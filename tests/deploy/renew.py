"""Regenerate the golden file of an example and the configuration file's part of
values.schema.json.

python -m tests.deploy.renew
"""

import json
from typing import Any, cast

from tests.support.deploy.chart import CHART, GOLDEN, ROOT, WITH_GOLDEN_FILE, render, values_of
from tidemill.cluster.config.tree import RootConfig
from tidemill.cluster.edge.requests.api_keys import ApiKey

SCHEMA = CHART / "values.schema.json"
PARTS = (
    "ModelConfig",
    "AutoscalingConfig",
    "EngineConfig",
    "AdapterConfig",
    "TelemetryConfig",
    "KvEventsConfig",
)
SET_BY_CHART = ("labels", "resources")
"""Keys of a group that the chart sets, to tie workers to pods."""


def golden_text() -> str:
    """Return all rendered templates; the dashboard is left out, for it has its own file."""
    dashboard = (ROOT / "deploy/grafana/tidemill.json").read_text().strip()
    lines = "\n".join(f"    {line}" for line in dashboard.splitlines())
    texts = {
        path: text.replace(lines, "    (deploy/grafana/tidemill.json)")
        for path, text in render(CHART, values_of(WITH_GOLDEN_FILE)).items()
    }
    parts = [f"# {path}\n{text.strip()}\n" for path, text in texts.items() if text.strip()]
    return "---\n".join(parts)


def schema_text() -> str:
    schema = json.loads(SCHEMA.read_text())
    defined = RootConfig.model_json_schema()["$defs"]
    group = defined["GroupConfig"]
    own = {"name": {"$ref": "#/$defs/GroupName"}, "pod": {"$ref": "#/$defs/Pod"}}
    kept = {name: value for name, value in group["properties"].items() if name not in SET_BY_CHART}
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
    """Remove pydantic's titles, which Helm's errors would use instead of the keys."""
    if isinstance(part, dict):
        node = cast("dict[str, Any]", part)
        titled = {"title": node["title"]} if "$schema" in node else {}
        return titled | {
            key: _untitled(value) for key, value in node.items() if key != "title" or isinstance(value, dict)
        }
    if isinstance(part, list):
        return [_untitled(item) for item in cast("list[Any]", part)]
    return part


def main() -> None:
    SCHEMA.write_text(schema_text())
    GOLDEN.write_text(golden_text())


if __name__ == "__main__":
    main()
