"""`helm install` refuses wrong values with an error that names them."""

from typing import Any

import helm_python
import pytest

from tests.support.deploy.chart import CHART, TRAFFIC, documents, find_one, render

PLAIN: dict[str, Any] = {"clusterTls": {"plain": True}}
POD: dict[str, Any] = {"resources": {}}
MIXED: dict[str, Any] = {"name": "mixed", "role": "mixed", "pod": POD}


def model(**group: object) -> dict[str, Any]:
    return {"models": [{"model": "keeper", "groups": [MIXED | group]}]}


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
        (model(pod={}), "at '/models/0/groups/0/pod': missing property 'resources'"),
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
        (model(name="frontend"), "give it another name"),
        ({"models": [{"model": name, "groups": [MIXED]} for name in "ab"]}, "two groups are called mixed"),
    ],
)
def test_conflicting_values_are_refused_with_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmRenderError) as error:
        render(CHART, PLAIN | values)
    assert message in str(error.value)


def test_cluster_name_is_short_enough_for_kuberay() -> None:
    """KubeRay appends up to ten characters to the name of a RayCluster and allows at most 53."""
    cluster = find_one(documents(CHART, PLAIN, release="a" * 53), "RayCluster")
    assert len(cluster["metadata"]["name"]) <= 40


def test_traffic_chart_requires_release() -> None:
    with pytest.raises(helm_python.HelmValuesError, match="at '/release'"):
        render(TRAFFIC, {})
