"""The charts as a whole: what the examples render to, and that Kubernetes, KubeRay and Helm take it."""

import base64
import json
import os
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import helm_python
import jsonschema
import kubernetes_validate  # pyright: ignore[reportMissingTypeStubs]
import pytest
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config

from tests.deploy.renew import SCHEMA, golden_file, golden_text, schema_text
from tests.support.deploy.chart import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    ROOT,
    SERVERS,
    TRAFFIC,
    Document,
    chart_of,
    documents_of,
    one,
    rendered,
    values_of,
)

CRDS = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "kuberay-crds"))
KUBERNETES = ("1.30", "1.37")
OF_OTHERS = {"RayCluster", "ServiceMonitor"}

WARNING = 2  # of Helm's severities


@pytest.fixture(params=EXAMPLES, ids=lambda example: example.stem)
def example(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_an_example_renders_to_its_golden_file(example: Path) -> None:
    assert golden_text(example) == golden_file(example).read_text(), (
        "see what changed, then: make helm-golden"
    )


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in golden_file(EXAMPLES[0]).parent.iterdir()} == {
        example.name for example in EXAMPLES
    }


def test_each_template_makes_something_in_an_example() -> None:
    for chart in (CHART, TRAFFIC):
        made = {
            path
            for example in EXAMPLES
            if chart_of(example) == chart
            for path, text in rendered(chart, values_of(example)).items()
            if text.strip()
        }
        files = {str(path.relative_to(chart)) for path in (chart / "templates").glob("[!_]*")}
        assert made == files


def test_the_schema_has_the_configuration_file_as_it_is() -> None:
    assert schema_text() == SCHEMA.read_text(), "make helm-golden"


def test_helm_has_no_complaints(example: Path) -> None:
    report = helm_python.lint(chart_of(example), values_of(example), strict=True)
    assert not report["errors"]
    assert not [message for message in report["messages"] if message["severity"] >= WARNING]


def test_the_chart_is_packed_with_the_dashboard(tmp_path: Path) -> None:
    """It is a link in the repository."""
    packed = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(packed) as chart:
        [dashboard] = [file["data"] for file in chart.files if file["name"] == "files/tidemill.json"]
    assert json.loads(_text(dashboard)) == json.loads((ROOT / "deploy/grafana/tidemill.json").read_text())


def _text(data: str) -> str:
    return data if data.lstrip().startswith("{") else base64.b64decode(data).decode()


def test_the_version_of_the_chart_is_that_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for chart in (CHART, TRAFFIC):
        assert yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"] == version


def test_the_version_of_ray_is_what_is_tested() -> None:
    version = yaml.safe_load((CHART / "values.yaml").read_text())["ray"]["version"]
    assert f"ray=={version}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_field(example: Path, version: str) -> None:
    found = [document for document in documents_of(example) if document["kind"] not in OF_OTHERS]
    assert found
    for document in found:
        kubernetes_validate.validate(document, version, strict=True)


def test_pods_of_ray_are_pods_of_kubernetes() -> None:
    """The CRD knows fields, not what goes into them: each template is looked at as a Pod, too."""
    for example in SERVERS:
        cluster = one(documents_of(example), "RayCluster")
        groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
        for group in groups:
            pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
            kubernetes_validate.validate(pod, KUBERNETES[0], strict=True)


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    deployment = one(documents_of(SERVERS[0]), "Deployment", "-frontend")
    wrong: Document = {**deployment, "spec": {**deployment["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[0], strict=True)


@pytest.mark.skipif(not CRDS.is_dir(), reason="set KUBERAY_CRDS to a folder with ray.io_rayclusters.yaml")
def test_kuberay_knows_every_field() -> None:
    for example in SERVERS:
        cluster = one(documents_of(example), "RayCluster")
        jsonschema.validate(cluster["spec"], _cluster_schema())
        wrong: Document = {**cluster["spec"], "networkIsolation": {}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, _cluster_schema())


@cache
def _cluster_schema() -> Mapping[str, Any]:
    crd = yaml.safe_load((CRDS / "ray.io_rayclusters.yaml").read_text())
    [version] = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    return _strict(version["schema"]["openAPIV3Schema"]["properties"]["spec"])


def _strict(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Of a CRD's schema, one that refuses what the API server would silently drop."""
    if isinstance(schema, list):
        return [_strict(part) for part in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    found = cast("dict[str, Any]", schema)
    strict = {key: _strict(part) for key, part in found.items()}
    if "properties" in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def test_what_prometheus_gets_is_there() -> None:
    """Its operator's schema is nowhere to be had offline: the fields are those of its documentation."""
    found = documents_of(next(example for example in SERVERS if example.stem == "2p4d"))
    monitor, service = one(found, "ServiceMonitor"), one(found, "Service", "chat-tidemill")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) == {"selector", "endpoints"}
    [endpoint] = monitor["spec"]["endpoints"]
    assert set(endpoint) == {"port", "path", "interval", "scheme", "tlsConfig"}
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_rays_autoscaler_reads_groups_as_they_are_meant() -> None:
    """It starts a pod for a worker that waits: by the resource and the label that this one asks for."""
    found = documents_of(next(example for example in SERVERS if example.stem == "2p4d"))
    cluster: Document = json.loads(json.dumps(one(found, "RayCluster")))
    cluster["metadata"]["namespace"] = NAMESPACE
    read = autoscaling_config._derive_autoscaling_config_from_ray_cr  # pyright: ignore[reportPrivateUsage]
    types = read(cluster)["available_node_types"]
    asked = yaml.safe_load(one(found, "ConfigMap", "-config")["data"]["cluster.yaml"])["models"][0]["groups"]
    by_label = {group["labels"]["tidemill-group"]: group for group in asked}
    for name, (least, most) in {"prefill": (2, 2), "decode": (4, 8)}.items():
        offered = types[name]
        assert (offered["min_workers"], offered["max_workers"]) == (least, most)
        assert by_label[name]["labels"] == offered["labels"]
        assert by_label[name]["resources"].items() <= offered["resources"].items()
        assert offered["resources"]["GPU"] == by_label[name]["num_gpus"]
    assert types["headgroup"]["resources"]["CPU"] == 0
