"""An example renders to its golden file; Kubernetes, KubeRay and Helm accept all of them."""

import base64
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from benchmarks.engine.released import RELEASED
from ray.autoscaler._private.kuberay import autoscaling_config

from tests.deploy.renew import SCHEMA, golden_text, schema_text
from tests.support.deploy.chart import (
    CHART,
    EXAMPLES,
    GOLDEN,
    NAMESPACE,
    ROOT,
    SERVERS,
    TRAFFIC_EXAMPLE,
    WITH_GOLDEN_FILE,
    Document,
    chart_of,
    config_text,
    documents_of,
    find_one,
    render,
    values_of,
)
from tidemill.workers.engine.memory_plan import DeviceMemory, arena_bytes
from tidemill.workers.models.architectures.config import weight_bytes
from tidemill.workers.models.architectures.registry import ARCHITECTURES
from tidemill.workers.settings import EngineSettings

CRDS = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "kuberay-crds"))
KUBERNETES = ("1.30", "1.37")
CUSTOM_KINDS = {"RayCluster", "ServiceMonitor", "PrometheusRule"}

WARNING = 2  # a severity of Helm


@pytest.fixture(params=EXAMPLES, ids=lambda example: example.stem)
def example(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_example_renders_to_its_golden_file() -> None:
    assert golden_text() == GOLDEN.read_text(), "check the changes, then run `make helm-golden`"


def test_every_template_is_in_the_golden_file_or_the_traffic_example() -> None:
    for example in (WITH_GOLDEN_FILE, TRAFFIC_EXAMPLE):
        chart = chart_of(example)
        rendered = {path for path, text in render(chart, values_of(example)).items() if text.strip()}
        assert rendered == {str(path.relative_to(chart)) for path in (chart / "templates").glob("[!_]*")}


def test_values_schema_matches_configuration_file() -> None:
    assert schema_text() == SCHEMA.read_text(), "run `make helm-golden`"


def test_charts_pass_helm_lint(example: Path) -> None:
    report = helm_python.lint(chart_of(example), values_of(example), strict=True)
    assert not report["errors"]
    assert not [message for message in report["messages"] if message["severity"] >= WARNING]


def test_chart_package_contains_dashboard(tmp_path: Path) -> None:
    """The dashboard is a symbolic link in the repository."""
    packed = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(packed) as chart:
        [dashboard] = [file["data"] for file in chart.files if file["name"] == "files/tidemill.json"]
    assert json.loads(_text(dashboard)) == json.loads((ROOT / "deploy/grafana/tidemill.json").read_text())


def _text(data: str) -> str:
    return data if data.lstrip().startswith("{") else base64.b64decode(data).decode()


def test_chart_has_tested_version_of_ray() -> None:
    version = yaml.safe_load((CHART / "values.yaml").read_text())["ray"]["version"]
    assert f"ray=={version}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_schema_has_every_field(example: Path, version: str) -> None:
    found = [document for document in documents_of(example) if document["kind"] not in CUSTOM_KINDS]
    assert found
    for document in found:
        kubernetes_validate.validate(document, version, strict=True)


def test_ray_pod_templates_are_valid_pods() -> None:
    """The CRD does not check the values of fields, so each template is checked as a Pod, too."""
    for example in SERVERS:
        cluster = find_one(documents_of(example), "RayCluster")
        groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
        for group in groups:
            pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
            kubernetes_validate.validate(pod, KUBERNETES[0], strict=True)


@pytest.mark.skipif(not CRDS.is_dir(), reason="set KUBERAY_CRDS to a folder with ray.io_rayclusters.yaml")
def test_kuberay_schema_has_every_field() -> None:
    for example in SERVERS:
        cluster = find_one(documents_of(example), "RayCluster")
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
    """Return a CRD's schema that refuses unknown fields, which the API server would silently drop."""
    if isinstance(schema, list):
        return [_strict(part) for part in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    node = cast("dict[str, Any]", schema)
    strict = {key: _strict(part) for key, part in node.items()}
    if "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def test_service_monitor_matches_service() -> None:
    found = documents_of(WITH_GOLDEN_FILE)
    monitor, service = find_one(found, "ServiceMonitor"), find_one(found, "Service", "chat-tidemill")
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


DEVICE_BYTES = {"NVIDIA-H100-80GB-HBM3": int(79.1 * 2**30), "NVIDIA-H200": int(139.8 * 2**30)}
"""The memory of devices by `nvidia.com/gpu.product`."""


@pytest.mark.parametrize("name", ["one-gpu", "four-gpus", "two-nodes", "2p4d"])
def test_examples_fit_the_gpus_that_they_name(name: str) -> None:
    """Weights and an eighth of the device for steps, graphs, pages and states."""
    [model] = values_of(next(example for example in SERVERS if example.stem == name))["models"]
    raw = RELEASED[Path(model["model"]).name]
    weights = weight_bytes(ARCHITECTURES[raw["architectures"][0]].parse(raw), "bfloat16")
    for group in model["groups"]:
        pod = group["pod"]
        ranks = group.get("tensor_parallel_size", 1)
        assert group["num_gpus"] == 1
        nodes = group.get("tensor_parallel_nodes", 1)
        assert pod["resources"]["limits"]["nvidia.com/gpu"] == str(ranks // nodes)
        total = DEVICE_BYTES[pod["nodeSelector"]["nvidia.com/gpu.product"]]
        settings = EngineSettings(
            model_folder=Path(model["model"]),
            cache_folder=Path(),
            store_url="",
            device=group["device"],
            tensor_parallel_size=ranks,
        )
        own = weights // ranks
        device = DeviceMemory(name=name, total=total, free=total - own, weights=own)
        assert arena_bytes(settings, device, total // 8) > 0


def test_ray_autoscaler_derives_node_types_of_groups() -> None:
    """The autoscaler starts a pod for a waiting worker by the resource and the label in its demand."""
    found = documents_of(WITH_GOLDEN_FILE)
    cluster: Document = json.loads(json.dumps(find_one(found, "RayCluster")))
    cluster["metadata"]["namespace"] = NAMESPACE
    read = autoscaling_config._derive_autoscaling_config_from_ray_cr
    types = read(cluster)["available_node_types"]
    groups = yaml.safe_load(config_text(found))["models"][0]["groups"]
    by_label = {group["labels"]["tidemill-group"]: group for group in groups}
    for name, (least, most) in {"prefill": (2, 2), "decode": (4, 8)}.items():
        offered = types[name]
        assert (offered["min_workers"], offered["max_workers"]) == (least, most)
        assert by_label[name]["labels"] == offered["labels"]
        assert by_label[name]["resources"].items() <= offered["resources"].items()
        assert offered["resources"]["GPU"] == by_label[name]["num_gpus"]
    assert types["headgroup"]["resources"]["CPU"] == 0
