"""The network policies open exactly the ports on which processes listen."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.deploy.chart import (
    CHART,
    EXAMPLES,
    SERVERS,
    TRAFFIC,
    TRAFFIC_EXAMPLE,
    Document,
    all_values_of,
    config_of,
    containers,
    documents,
    documents_of,
    find_one,
    pods,
    values_of,
)
from tests.support.deploy.commands import Flags, lines_of, ray_start, start_options

Ports = set[tuple[int, int]]

LENT: Ports = {(15000, 17000)}
"""The range in which Mooncake's transfer engine picks two ports."""


JOINING: list[Document] = [{"ipBlock": {"cidr": "10.1.0.0/16"}}]


@pytest.fixture(params=SERVERS, ids=lambda example: example.stem)
def found(request: pytest.FixtureRequest) -> list[Document]:
    return documents_of(request.param)


def opened(rules: list[Document]) -> Ports:
    return {(port["port"], port.get("endPort", port["port"])) for rule in rules for port in rule["ports"]}


def ray_node_ports(flags: Flags) -> Ports:
    """Return the ports of a Ray node for other nodes; its runtime environment agent has only local
    clients."""
    names = ("node_manager_port", "object_manager_port", "dashboard_agent_grpc_port")
    more = ("dashboard_agent_listen_port", "metrics_export_port")
    return {(flags[name], flags[name]) for name in (*names, *more)} | {
        (flags["min_worker_port"], flags["max_worker_port"])
    }


def ephemeral_ports(pod: Document) -> Ports:
    """Return the range of ephemeral ports of a pod, which the gRPC of routers and workers uses."""
    [setting] = pod["spec"]["securityContext"]["sysctls"]
    assert setting["name"] == "net.ipv4.ip_local_port_range"
    first, last = map(int, setting["value"].split())
    return {(first, last)}


def without_joining(rules: list[Document]) -> list[Document]:
    """Return the rules without that for edges outside of the release."""
    return [rule for rule in rules if rule.get("from") != JOINING]


def allows(policy: Document, pod: Document, more: dict[str, str]) -> bool:
    wanted: dict[str, str] = policy["podSelector"]["matchLabels"]
    return wanted.items() <= {**pod["metadata"]["labels"], **more}.items()


def test_frontend_policy_opens_listening_ports(found: list[Document]) -> None:
    frontend = pods(found)["frontend"]
    [container] = frontend["spec"]["containers"]
    [start] = [words[2:] for words in lines_of(container) if words[:2] == ["ray", "start"]]
    config = config_of(found)
    edge = config.edge
    for_clients = {(port, port) for port in (edge.port, edge.grpc_port) if port is not None}
    assert {(port["containerPort"],) * 2 for port in container["ports"]} == for_clients

    policy = find_one(found, "NetworkPolicy", "-frontend")["spec"]
    clients, ray, *edges = without_joining(policy["ingress"])
    assert policy["policyTypes"] == ["Ingress"]
    assert opened([clients]) == for_clients
    routers = opened([ray]) - (ray_node_ports(ray_start(start)) | ephemeral_ports(frontend))
    assert opened([ray]) >= ray_node_ports(ray_start(start)) | ephemeral_ports(frontend)
    [(first, last)] = routers
    assert first == config.cluster.router_port
    assert first + sum(model.routers for model in config.models) <= last + 1
    assert bool(edges) is ("edge" in pods(found))
    for rule in edges:
        assert opened([rule]) == routers
        assert [allows(peer, pods(found)["edge"], {}) for peer in rule["from"]] == [True]
    assert ray["from"] == [{"podSelector": {"matchLabels": {"ray.io/cluster": "chat-tidemill"}}}]


def test_ray_policy_opens_ports_for_frontend(found: list[Document]) -> None:
    spec = find_one(found, "RayCluster")["spec"]
    policy = spec["networkPolicy"]
    assert policy["mode"] == "DenyAllIngress"
    agents = {"dashboard_agent_grpc_port", "dashboard_agent_listen_port", "metrics_export_port"}
    head = ray_start(["--head", *start_options(spec["headGroupSpec"])])
    asked = ray_node_ports({**head, **dict.fromkeys(agents, head["node_manager_port"])})
    assert opened(policy["head"]["ingressRules"]) == asked | {(6379, 6379)}, "and not for edges elsewhere"
    for group in spec["workerGroupSpecs"]:
        flags = ray_start(["--address=head:6379", *start_options(group)])
        asked = ray_node_ports({**flags, **dict.fromkeys(agents, flags["node_manager_port"])})
        pod = pods(found)[f"worker/{group['groupName']}"]
        assert opened(policy["worker"]["ingressRules"]) == asked | ephemeral_ports(pod)
    for rules in (policy["head"]["ingressRules"], policy["worker"]["ingressRules"][:1]):
        [peer] = [peer for rule in rules for peer in rule["from"]]
        assert allows(peer, pods(found)["frontend"], {})
        assert not allows(peer, pods(found)["head"], {})
    edges = without_joining(policy["worker"]["ingressRules"][1:])
    assert bool(edges) is ("edge" in pods(found))
    for rule in edges:
        assert opened([rule]) == ephemeral_ports(pods(found)["frontend"]), "the gRPC of workers alone"
        assert [allows(peer, pods(found)["edge"], {}) for peer in rule["from"]] == [True]


def test_edge_policy_opens_listening_ports(found: list[Document]) -> None:
    if "edge" in pods(found):
        [container] = pods(found)["edge"]["spec"]["containers"]
        [rule] = find_one(found, "NetworkPolicy", "-edge")["spec"]["ingress"]
        assert opened([rule]) == {(port["containerPort"],) * 2 for port in container["ports"]}


def test_store_policies_admit_only_users_of_store(found: list[Document]) -> None:
    if "mooncake" not in pods(found):
        assert not [document for document in found if document["metadata"]["name"].endswith("store-memory")]
        return
    [master] = pods(found)["mooncake"]["spec"]["containers"]
    listens = {(port["containerPort"],) * 2 for port in master["ports"]}
    flags = dict(flag.split("=", 1) for flag in master["command"] if "=" in flag)
    assert listens == {(int(flags[name]),) * 2 for name in ("--rpc_port", "--metrics_port")}
    policies = {
        name: find_one(found, "NetworkPolicy", f"-{name}")["spec"] for name in ("mooncake", "store-memory")
    }
    assert opened(policies["mooncake"]["ingress"]) == listens
    assert opened(policies["store-memory"]["ingress"]) == LENT

    labelled = {"ray.io/cluster": "chat-tidemill", "ray.io/node-type": "worker"}
    worker = next(pod for name, pod in pods(found).items() if name.startswith("worker"))
    for name, policy in policies.items():
        [rule] = policy["ingress"]
        let_in = {
            client: any(allows(peer, pod, more) for peer in rule["from"])
            for client, pod, more in (
                ("worker", worker, labelled),
                ("frontend", pods(found)["frontend"], {}),
                ("head", pods(found)["head"], {**labelled, "ray.io/node-type": "head"}),
                ("store-memory", pods(found)["store-memory"], {}),
            )
        }
        assert let_in == {
            "worker": True,
            "frontend": True,
            "head": False,
            "store-memory": name == "mooncake",
        }


def test_mooncake_opens_ports_only_behind_policy() -> None:
    """These pods lack the capability that newer kernels need to restrict the ports to their peers."""
    for enabled in (True, False):
        found = documents(CHART, {"clusterTls": {"plain": True}, "networkPolicy": {"enabled": enabled}})
        assert ("ports=open" in (config_of(found).store.url or "")) is enabled
        [owner] = pods(found)["store-memory"]["spec"]["containers"]
        assert ("--ports=open" in owner["command"]) is enabled
        assert any(document["kind"] == "NetworkPolicy" for document in found) is enabled
        assert ("networkPolicy" in find_one(found, "RayCluster")["spec"]) is enabled


def test_port_ranges_of_pod_do_not_overlap(found: list[Document]) -> None:
    spec = find_one(found, "RayCluster")["spec"]
    for group in spec["workerGroupSpecs"]:
        taken = sorted(
            ray_node_ports(ray_start(["--address=head:6379", *start_options(group)]))
            | ephemeral_ports(pods(found)[f"worker/{group['groupName']}"])
            | LENT
        )
        assert all(before[1] < after[0] for before, after in pairwise(taken))


def test_every_policy_and_service_selects_one_pod(found: list[Document]) -> None:
    labels = [pod["metadata"]["labels"].items() for pod in pods(found).values()]
    for document in found:
        if document["kind"] in ("NetworkPolicy", "Service"):
            spec = document["spec"]
            wanted = spec["selector"] if document["kind"] == "Service" else spec["podSelector"]["matchLabels"]
            assert len([pod for pod in labels if wanted.items() <= pod]) == 1, document["metadata"]["name"]


def test_services_target_existing_ports(found: list[Document]) -> None:
    for service in (document for document in found if document["kind"] == "Service"):
        [pod] = [
            pod
            for pod in pods(found).values()
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        named = {port["name"] for container in containers(pod) for port in container.get("ports", [])}
        config = config_of(found).cluster
        targets = {port["targetPort"] for port in service["spec"]["ports"]}
        join_port = config.router_port + len(config_of(found).models)
        joins = {join_port} if config.ssl_ca_keyfile else set[int]()
        assert targets <= named | {config.router_port} | joins


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_service_and_ingress_are_those_of_the_values(example: Path) -> None:
    """The Ingress of both charts leads to the Service of clients by the names of its port and its own."""
    values, found = all_values_of(example), documents_of(example)
    own = "chat" if example == TRAFFIC_EXAMPLE else "chat-tidemill"
    [service] = [
        document["spec"]
        for document in found
        if document["metadata"]["name"] == own and document["kind"] == "Service"
    ]
    assert service["type"] == values["service"]["type"]
    wanted = {"http": values["service"]["port"]}
    if values.get("grpc") or values.get("frontend", {}).get("grpc"):
        wanted["grpc"] = values["service"]["grpcPort"]
    assert [(port["name"], port["port"], port["targetPort"]) for port in service["ports"]] == [
        (name, port, name) for name, port in wanted.items()
    ]
    assert any(document["kind"] == "Ingress" for document in found) is values["ingress"]["enabled"]
    if values["ingress"]["enabled"]:
        ingress, given = find_one(found, "Ingress"), values["ingress"]
        assert ingress["metadata"].get("annotations", {}) == given["annotations"]
        assert ingress["spec"]["ingressClassName"] == given["className"]
        assert ingress["spec"]["tls"] == [{"hosts": [given["host"]], "secretName": given["tlsSecret"]}]
        [rule] = ingress["spec"]["rules"]
        [path] = rule["http"]["paths"]
        assert (rule["host"], path["path"], path["pathType"]) == (given["host"], "/", "Prefix")
        assert path["backend"]["service"] == {"name": own, "port": {"name": "http"}}


def test_traffic_service_selects_one_of_two_releases() -> None:
    """The Service of the traffic chart selects one release of a blue-green deployment."""
    values = values_of(next(example for example in SERVERS if example.stem == "cpu-only"))
    releases = {name: documents(CHART, values, release=name) for name in ("chat-blue", "chat-green")}
    names = [
        {(document["kind"], document["metadata"]["name"]) for document in found}
        for found in releases.values()
    ]
    assert not names[0] & names[1]
    for release, found in releases.items():
        traffic = documents(TRAFFIC, {**values_of(TRAFFIC_EXAMPLE), "release": release})
        assert find_one(traffic, "Service")["metadata"]["name"] == "chat"
        for document in [*traffic, *found]:
            if document["kind"] == "Service":
                answers = {
                    name
                    for name, others in releases.items()
                    for pod in pods(others).values()
                    if document["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
                }
                assert answers == {release}, document["metadata"]["name"]
