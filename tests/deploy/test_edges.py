"""Edges of a release join its routers with the cluster's certificate, and clients reach them."""

from typing import Any

import pytest

from tests.support.deploy.chart import CHART, Document, config_of, containers, documents, find_one, pods
from tidemill.cluster.cli.main import parser
from tidemill.cluster.cli.serve import MARK, routers_of

SECRET = {"clusterTls": {"existingSecret": "cluster"}}
ON = SECRET | {"edges": {"enabled": True}}


def edge(found: list[Document]) -> tuple[Document, dict[str, Any]]:
    """The container, and the values of its flags as the command reads them."""
    [container] = containers(pods(found)["edge"])
    command = container["command"]
    assert command[:4] == ["tini", "--", "tidemill", "edge"]
    options = vars(parser().parse_args(command[3:]))
    flags = {name.removeprefix(MARK): options[name] for name in options if name.startswith(MARK)}
    return container, flags | {"--join": options["join"]}


def selects(service: Document, pod: Document) -> bool:
    return service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_release_without_edges_has_none_of_it() -> None:
    found = documents(CHART, SECRET)
    assert "edge" not in pods(found)
    assert not [document for document in found if document["kind"] == "HorizontalPodAutoscaler"]
    assert selects(find_one(found, "Service", "chat-tidemill"), pods(found)["frontend"])


def test_edges_join_the_routers_of_the_frontend() -> None:
    found = documents(CHART, ON)
    _, flags = edge(found)
    [(host, _, port)] = [address.rpartition(":") for address in routers_of(flags["--join"])]
    service = find_one(found, "Service", "-routers")
    assert service["metadata"]["name"] == host
    assert service["spec"]["publishNotReadyAddresses"], "the frontend is ready after its routers"
    assert [str(entry["port"]) for entry in service["spec"]["ports"]] == [port]
    assert selects(service, pods(found)["frontend"])
    assert not selects(service, pods(found)["edge"])
    config = config_of(found)
    assert str(config.cluster.router_port) == port


def test_edges_have_the_certificate_of_the_cluster_from_its_secret() -> None:
    container, flags = edge(documents(CHART, ON))
    assert flags["--cluster-ssl-certfile"] == "/etc/tidemill/cluster-tls/tls.crt"
    assert flags["--cluster-ssl-keyfile"] == "/etc/tidemill/cluster-tls/tls.key"
    assert flags["--cluster-ssl-ca-certs"] == "/etc/tidemill/cluster-tls/ca.crt"
    assert "/etc/tidemill/cluster-tls" in [mount["mountPath"] for mount in container["volumeMounts"]]
    [volume] = [
        volume for volume in pods(documents(CHART, ON))["edge"]["spec"]["volumes"] if "secret" in volume
    ]
    assert volume["secret"]["secretName"] == "cluster"
    _, plain = edge(documents(CHART, {"clusterTls": {"plain": True}, "edges": {"enabled": True}}))
    assert plain["--cluster-ssl-certfile"] is None


def test_clients_reach_edges_and_not_the_frontend() -> None:
    tls = {"edgeTls": {"existingSecret": "https"}, "frontend": {"grpc": True}}
    found = documents(CHART, ON | tls)
    service = find_one(found, "Service", "chat-tidemill")
    assert selects(service, pods(found)["edge"])
    assert not selects(service, pods(found)["frontend"])
    container, flags = edge(found)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": flags["--port"], "grpc": flags["--grpc-port"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    assert flags["--ssl-certfile"] == "/etc/tidemill/tls/tls.crt"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"


@pytest.mark.parametrize("scaled", [False, True])
def test_autoscaler_has_the_number_of_edges(scaled: bool) -> None:  # noqa: FBT001 - a parameter of the test
    given = {"enabled": True, "replicas": 3, "autoscaling": {"enabled": scaled, "maxReplicas": 5}}
    found = documents(CHART, SECRET | {"edges": given})
    deployment = find_one(found, "Deployment", "-edge")
    assert deployment["spec"].get("replicas") == (None if scaled else 3)
    budget = find_one(found, "PodDisruptionBudget", "-edge")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == deployment["spec"]["selector"]
    if scaled:
        autoscaler = find_one(found, "HorizontalPodAutoscaler", "-edge")["spec"]
        assert autoscaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (2, 5)


def test_edges_elsewhere_join_by_tokens() -> None:
    """The frontend has the authority's key, and the policies admit the peers to routers and workers alone."""
    peers: list[dict[str, Any]] = [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    models: list[dict[str, Any]] = [
        {
            "model": "keeper",
            "routers": 2,
            "groups": [{"name": "a", "role": "mixed", "pod": {"resources": {}}}],
        }
    ]
    values: dict[str, Any] = SECRET | {
        "joining": {"existingSecret": "authority", "peers": peers},
        "models": models,
    }
    found = documents(CHART, values)
    config = config_of(found)
    key = config.cluster.ssl_ca_keyfile
    assert key is not None
    folder, _, name = key.rpartition("/")
    assert name == "ca.key"
    [container] = pods(found)["frontend"]["spec"]["containers"]
    [mount] = [mount for mount in container["volumeMounts"] if mount["mountPath"] == folder]
    for pod_name, pod in pods(found).items():
        secrets = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"]]
        assert bool(secrets) is (pod_name == "frontend"), pod_name
        assert [volume["secret"]["secretName"] for volume in secrets] in ([], ["authority"])
    ports = {port["name"]: port["port"] for port in find_one(found, "Service", "-routers")["spec"]["ports"]}
    assert ports == {"router": config.cluster.router_port, "join": config.cluster.router_port + 2}
    policies = {
        "frontend": find_one(found, "NetworkPolicy", "-frontend")["spec"]["ingress"],
        "worker": find_one(found, "RayCluster")["spec"]["networkPolicy"]["worker"]["ingressRules"],
    }
    admitted = {
        name: [rule["ports"] for rule in rules if rule.get("from") == peers]
        for name, rules in policies.items()
    }
    [[routers]], [[workers]] = admitted["frontend"], admitted["worker"]
    assert routers["port"] <= ports["join"] <= routers["endPort"]
    [setting] = pods(found)["worker/a"]["spec"]["securityContext"]["sysctls"]
    assert setting["value"] == f"{workers['port']} {workers['endPort']}", "the gRPC of workers"


def test_release_without_the_key_of_the_authority_admits_no_edges_elsewhere() -> None:
    found = documents(CHART, ON)
    assert [port["name"] for port in find_one(found, "Service", "-routers")["spec"]["ports"]] == ["router"]
    config = config_of(found)
    assert config.cluster.ssl_ca_keyfile is None
