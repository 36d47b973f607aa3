"""The Helm charts and their examples, rendered in this process by Helm's library."""

from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tidemill.cluster.config.reading import parse_config
from tidemill.cluster.config.tree import RootConfig

ROOT = Path(__file__).parents[3]
HELM = ROOT / "deploy" / "helm"
CHART = HELM / "tidemill"
TRAFFIC = HELM / "tidemill-traffic"
EXAMPLES = tuple(sorted((HELM / "examples").glob("*.yaml")))
TRAFFIC_EXAMPLE = HELM / "examples" / "traffic.yaml"
SERVERS = tuple(example for example in EXAMPLES if example != TRAFFIC_EXAMPLE)
WITH_GOLDEN_FILE = HELM / "examples" / "2p4d.yaml"
"""It uses every template of the chart."""

GOLDEN = Path(__file__).parents[2] / "deploy/golden" / WITH_GOLDEN_FILE.name

RELEASE, NAMESPACE = "chat", "llm"

Values = dict[str, Any]
Document = dict[str, Any]


def chart_of(example: Path) -> Path:
    return TRAFFIC if example == TRAFFIC_EXAMPLE else CHART


def values_of(example: Path) -> Values:
    return yaml.safe_load(example.read_text())


def merged(defaults: Values, values: Values) -> Values:
    """Return the values over the defaults, as Helm merges them."""
    both = {
        key: merged(defaults[key], value)
        for key, value in values.items()
        if _are_maps(defaults.get(key), value)
    }
    return defaults | values | both


def _are_maps(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)


def all_values_of(example: Path) -> Values:
    """Return the values of an example with the defaults of its chart."""
    return merged(yaml.safe_load((chart_of(example) / "values.yaml").read_text()), values_of(example))


def render(chart: Path, values: Values, release: str = RELEASE) -> dict[str, str]:
    """Return the text of each template by its path in the chart. Raises HelmError."""
    with helm_python.Chart.load(chart) as loaded:
        loaded.validate_schema(values)
        texts = loaded.render(values, name=release, namespace=NAMESPACE)
    return {path.partition("/")[2]: text for path, text in sorted(texts.items())}


def documents(chart: Path, values: Values, release: str = RELEASE) -> list[Document]:
    """Return the documents that Helm would apply."""
    texts = render(chart, values, release)
    return [
        document
        for path, text in texts.items()
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


@cache
def documents_of(example: Path) -> list[Document]:
    """Return the documents of an example, which tests must not change."""
    return documents(chart_of(example), values_of(example))


def find_one(found: list[Document], kind: str, suffix: str = "") -> Document:
    """Return the only document of a kind whose name has this suffix."""
    [document] = [
        document
        for document in found
        if document["kind"] == kind and document["metadata"]["name"].endswith(suffix)
    ]
    return document


def config_text(found: list[Document]) -> str:
    """Return the configuration file of the servers."""
    return find_one(found, "ConfigMap", "-config")["data"]["cluster.yaml"]


def config_of(found: list[Document]) -> RootConfig:
    return parse_config(config_text(found), "cluster.yaml")


def pods(found: list[Document]) -> dict[str, Document]:
    """Return the pod templates by component: `frontend`, `head`, and each group as `worker/prefill`."""
    templates: dict[str, Document] = {}
    for document in found:
        if document["kind"] == "Deployment":
            template = document["spec"]["template"]
            templates[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
        if document["kind"] == "RayCluster":
            templates["head"] = document["spec"]["headGroupSpec"]["template"]
            for group in document["spec"]["workerGroupSpecs"]:
                templates[f"worker/{group['groupName']}"] = group["template"]
    return templates


def containers(pod: Document) -> list[Document]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
