"""Values reach the pods and services that they are for; `helm install` refuses wrong ones by name."""

from collections.abc import Callable
from typing import Any

import helm_python
import pytest

from tests.support.deploy.chart import (
    CHART,
    TRAFFIC,
    config_of,
    containers,
    documents,
    find_one,
    pods,
    render,
)

PLAIN: dict[str, Any] = {"clusterTls": {"plain": True}}
POD: dict[str, Any] = {"resources": {}}
MIXED: dict[str, Any] = {"name": "mixed", "role": "mixed", "pod": POD}


def model(**group: object) -> dict[str, Any]:
    return {"models": [{"model": "keeper", "groups": [MIXED | group]}]}


def engine(name: str, replicas: int = 1, **adapter: object) -> dict[str, Any]:
    groups = [MIXED | {"replicas": replicas}]
    return {"models": [{"model": "keeper", "groups": groups, "adapter": {"engine": name, **adapter}}]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modles": []}, "additional properties 'modles' not allowed"),
        ({"frontend": {"replicas": 2}}, "at '/frontend/replicas': value must be 1"),
        ({"frontend": {"drainSeconds": 3}}, "at '/frontend/drainSeconds': minimum: got 3, want 6"),
        ({"podSecurity": {"runAsUser": 0}}, "at '/podSecurity/runAsUser': minimum: got 0, want 1"),
        (model(role="both"), "at '/models/0/groups/0/role': value must be one of 'prefill', 'decode'"),
        (model(memory="lots"), "at '/models/0/groups/0/memory': 'lots' does not match pattern"),
        (model(replica=2), "at '/models/0/groups/0': additional properties 'replica' not allowed"),
        (model(labels={"a": "b"}), "at '/models/0/groups/0': additional properties 'labels' not allowed"),
        (model(name="Mixed"), "at '/models/0/groups/0/name': 'Mixed' does not match pattern"),
        ({"frontend": {"allowed_origins": "*"}}, "at '/frontend/allowed_origins': got string, want array"),
        (model(pod={}), "at '/models/0/groups/0/pod': missing property 'resources'"),
        (engine("vlm"), "at '/models/0/adapter/engine': 'vlm' does not match pattern"),
        (engine("vllm", arguments="--seed 1"), "at '/models/0/adapter': additional properties 'arguments'"),
        ({"apiKeys": {"keys": [{"tenant": "a", "sha256": "sk-a"}]}}, "at '/apiKeys/keys/0/sha256': 'sk-a'"),
        ({"mooncake": {"ha": {"etcdEndpoints": ["etcd"]}}}, "at '/mooncake/ha/etcdEndpoints/0': 'etcd' does"),
    ],
)
def test_wrong_value_is_named_with_its_path(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as error:
        render(CHART, PLAIN | values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clusterTls": {}}, "clusterTls.existingSecret is empty: name a Secret"),
        ({"clusterTls": {"plain": True, "existingSecret": "a"}}, "exclude each other: leave one"),
        ({"apiKeys": {"existingSecret": "a", "keys": [{"tenant": "a", "sha256": "0" * 64}]}}, "exclude each"),
        (
            {"edges": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
            "edges.autoscaling.minReplicas is more than maxReplicas",
        ),
        ({"joining": {"existingSecret": "a"}}, "name them in clusterTls.existingSecret"),
        (
            {"clusterTls": {"existingSecret": "a"}, "joining": {"existingSecret": "b"}},
            "joining.peers is empty",
        ),
        ({"edgeTls": {"clientCa": True}}, "edgeTls.clientCa needs edgeTls.existingSecret"),
        ({"ingress": {"enabled": True, "tlsSecret": "a"}}, "ingress.tlsSecret needs ingress.host"),
        ({"mooncake": {"ha": {"enabled": True}}}, "mooncake.ha.etcdEndpoints is empty"),
        ({"store": {"url": "file:///a"}}, "set mooncake.enabled to false"),
        ({"mooncake": {"enabled": False}}, "workers have no store"),
        ({"store": {"folder": {"size": "1GiB"}}}, "store.folder.size needs store.folder.volume"),
        ({"store": {"folder": {"volume": {"emptyDir": {}}}}}, "store.folder.volume needs store.folder.size"),
        (
            {
                "mooncake": {"enabled": False},
                "store": {"folder": {"size": "1GiB", "volume": {"emptyDir": {}}}},
            },
            "an emptyDir, which pods do not share",
        ),
        ({"ray": {"tls": {"enabled": True}, "autoscaling": {"enabled": True}}}, "exclude each other"),
        (model(replicas_max=3), "set ray.autoscaling.enabled"),
        (model(device="cuda"), "set nvidia.com/gpu in pod.resources.limits"),
        (
            model(
                device="cuda", tensor_parallel_size=4, pod={"resources": {"limits": {"nvidia.com/gpu": "2"}}}
            ),
            "has 4 ranks on 2 GPUs: set nvidia.com/gpu",
        ),
        (
            model(
                device="cuda",
                tensor_parallel_size=8,
                tensor_parallel_nodes=2,
                pod={"resources": {"limits": {"nvidia.com/gpu": "2"}}},
            ),
            "has 4 ranks on 2 GPUs: set nvidia.com/gpu",
        ),
        (model(tensor_parallel_size=4, tensor_parallel_nodes=3), "4 ranks on 3 nodes, not as many on each"),
        (engine("vllm=http://a,http://b"), "mixed has 1 workers for the 2 servers of adapter.engine"),
        (model(name="frontend"), "give it another name"),
        ({"models": [{"model": name, "groups": [MIXED]} for name in "ab"]}, "two groups are called mixed"),
    ],
)
def test_conflicting_values_are_refused_with_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmRenderError) as error:
        render(CHART, PLAIN | values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "url"),
    [
        (engine("vllm=http://a,http://b", replicas=2) | {"mooncake": {"enabled": False}}, None),
        (
            engine("vllm", replicas=2) | {"store": {"url": "file:///a"}, "mooncake": {"enabled": False}},
            "file:///a",
        ),
        (
            engine("tidemill", replicas=2),
            "mooncake://chat-tidemill-mooncake:50051?admin=chat-tidemill-mooncake:9003&ports=open",
        ),
    ],
)
def test_engines_of_others_need_no_store(values: dict[str, Any], url: str | None) -> None:
    config = config_of(documents(CHART, PLAIN | values))
    assert config.store.url == url
    assert config.models[0].adapter.engine == values["models"][0]["adapter"]["engine"]


def test_cluster_name_is_short_enough_for_kuberay() -> None:
    """KubeRay appends up to ten characters to the name of a RayCluster and allows at most 53."""
    cluster = find_one(documents(CHART, PLAIN, release="a" * 53), "RayCluster")
    assert len(cluster["metadata"]["name"]) <= 40


def test_traffic_chart_requires_release() -> None:
    with pytest.raises(helm_python.HelmValuesError, match="at '/release'"):
        render(TRAFFIC, {})


TOKEN: dict[str, Any] = {
    "name": "HF_TOKEN",
    "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
}
PROXY = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
SPREAD: dict[str, Any] = {
    "maxSkew": 1,
    "topologyKey": "zone",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"a": "b"}},
}
PLACE = {"priorityClassName": "high", "topologySpreadConstraints": [SPREAD]}
MARKED = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
Values = dict[str, Any]
PARTS: dict[str, Callable[[Values], Values]] = {
    "frontend": lambda own: {"frontend": own},
    "edge": lambda own: {"edges": own},
    "head": lambda own: {"ray": {"head": own}},
    "worker/mixed": lambda own: model(pod=POD | own),
    "mooncake": lambda own: {"mooncake": own},
    "store-memory": lambda own: {"mooncake": {"memory": own}},
}
"""The values of the chart with these ones for a component."""


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    return documents(CHART, PLAIN | model() | values)


def of_part(part: str, own: Values) -> dict[str, Any]:
    """Return the pod of a component with these values of its own."""
    values = PARTS[part](own)
    return pods(rendered(values | {"edges": {"enabled": True} | values.get("edges", {})}))[part]


@pytest.mark.parametrize("part", PARTS)
def test_pods_are_placed_and_marked(part: str) -> None:
    marked = MARKED if part not in ("mooncake", "store-memory") else {}
    pod = of_part(part, PLACE | marked)
    assert PLACE.items() <= pod["spec"].items()
    assert all(found.items() <= pod["metadata"][where].items() for where, found in marked.items())


@pytest.mark.parametrize("part", ["frontend", "edge", "worker/mixed"])
def test_pods_that_download_have_the_environment_of_all_and_their_own(part: str) -> None:
    given: dict[str, Any] = {"env": [TOKEN], "edges": {"enabled": True}}
    assert TOKEN in pods(rendered(given))[part]["spec"]["containers"][0]["env"]
    assert PROXY in of_part(part, {"env": [PROXY]})["spec"]["containers"][0]["env"]


def test_pods_that_answer_clients_have_the_url_of_the_database() -> None:
    values = {"database": {"existingSecret": "pg", "key": "url"}, "edges": {"enabled": True}}
    url = {"name": "TIDEMILL_DATABASE", "valueFrom": {"secretKeyRef": {"name": "pg", "key": "url"}}}
    for part, pod in pods(rendered(values)).items():
        answers = part in {"frontend", "edge"}
        assert (url in pod["spec"]["containers"][0].get("env", [])) is answers, part


def test_workers_keep_compiled_kernels_on_the_volume_for_them() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "kernels"}}
    found = pods(documents(CHART, PLAIN | {"kernelCache": claim, "sharedMemory": "3Gi"}))
    for name, pod in found.items():
        is_worker, at = name.startswith("worker/"), "/var/cache/tidemill"
        for container in containers(pod):
            folders = {item["name"]: item.get("value") for item in container.get("env", [])}
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            kept = folders.get("TRITON_CACHE_DIR"), mounts.get("kernels")
            assert kept == ((at, at) if is_worker else (None, None))
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes.get("kernels") == ({"name": "kernels"} | claim if is_worker else None)
        assert volumes["shm"]["emptyDir"]["sizeLimit"] == "3Gi"


def test_ids_that_are_null_are_left_to_the_cluster() -> None:
    values = {"podSecurity": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}
    for pod in pods(rendered(values | {"edges": {"enabled": True}})).values():
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & security.keys()


def test_service_has_its_node_ports_and_marks() -> None:
    values = {"type": "NodePort", "nodePort": 30080, "grpcNodePort": 30081} | MARKED
    service = find_one(rendered({"service": values, "frontend": {"grpc": True}}), "Service", "tidemill")
    assert [port["nodePort"] for port in service["spec"]["ports"]] == [30080, 30081]
    assert all(found.items() <= service["metadata"][where].items() for where, found in MARKED.items())


@pytest.mark.parametrize(
    ("own", "origins", "credentials"),
    [
        ({}, (), False),
        ({"allowed_origins": ["*"]}, ("*",), False),
        (
            {"allowed_origins": ["https://a.example", "b"], "allow_credentials": True},
            ("https://a.example", "b"),
            True,
        ),
    ],
)
def test_sites_whose_pages_may_call_are_in_the_configuration(
    own: Values, origins: tuple[str, ...], *, credentials: bool
) -> None:
    """Edges learn them from the catalogue."""
    edge = config_of(rendered({"frontend": own})).edge
    assert (edge.allowed_origins, edge.allow_credentials) == (origins, credentials)
