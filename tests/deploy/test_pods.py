"""What runs in the pods of the chart, and what it may."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploy.chart import (
    CHART,
    SERVERS,
    Document,
    containers,
    documents,
    documents_of,
    one,
    pods,
    values_of,
)
from tests.support.deploy.commands import lends, lines_of, ray_start, start_options, tidemill
from tidemill.cluster.config.reading import parse_config
from tidemill.cluster.config.tree import EdgeConfig
from tidemill.cluster.edge.requests.api_keys import read_keys
from tidemill.cluster.supervisor.mooncake_service import master_process
from tidemill.cluster.supervisor.store_plan import Master, plan_store
from tidemill.kvstore.stores.open_store import check_url

EVERYTHING = next(example for example in SERVERS if example.stem == "2p4d")
ENCRYPTED = next(example for example in SERVERS if example.stem == "encrypted")


@pytest.fixture(params=SERVERS, ids=lambda example: example.stem)
def example(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def found(example: Path) -> list[Document]:
    return documents_of(example)


def config_of(found: list[Document]) -> str:
    return one(found, "ConfigMap", "-config")["data"]["cluster.yaml"]


def test_nobody_is_root_and_the_root_is_read_only(found: list[Document]) -> None:
    assert {"frontend", "head"} < set(pods(found))
    for pod in pods(found).values():
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert min(security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")) > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "hostNetwork" not in pod["spec"]
        for container in containers(pod):
            own = container["securityContext"]
            assert own["runAsNonRoot"]
            assert own["readOnlyRootFilesystem"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_no_pod_has_a_token_of_kubernetes(found: list[Document]) -> None:
    """But the head where Ray's autoscaler runs in it."""
    cluster = one(found, "RayCluster")
    for name, pod in pods(found).items():
        scales = name == "head" and cluster["spec"].get("enableInTreeAutoscaling", False)
        assert pod["spec"].get("automountServiceAccountToken", True) is scales


def test_the_autoscaler_is_held_as_all_others() -> None:
    spec = one(documents_of(EVERYTHING), "RayCluster")["spec"]
    [container] = spec["headGroupSpec"]["template"]["spec"]["containers"]
    assert spec["autoscalerOptions"]["securityContext"] == container["securityContext"]


def test_what_is_mounted_is_there_once(found: list[Document]) -> None:
    for pod in pods(found).values():
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        assert len(set(volumes)) == len(volumes)
        for container in containers(pod):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths)
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= set(volumes)
        used = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert used == set(volumes)


def test_what_volumes_are_made_of_is_there(found: list[Document], example: Path) -> None:
    """In the chart, or named by who installs it; KubeRay makes the certificate of Ray's pods."""
    made = {(document["kind"], document["metadata"]["name"]) for document in found}
    cluster = one(found, "RayCluster")["metadata"]["name"]
    named = {("Secret", f"ray-worker-secret-{cluster}")}
    named |= {("Secret", word) for word in re.findall(r"[\w.-]+", example.read_text())}
    for pod in pods(found).values():
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in made | named


def test_the_configuration_is_one_that_tidemill_takes(found: list[Document]) -> None:
    config = parse_config(config_of(found), "cluster.yaml")
    assert config.edge.host == "0.0.0.0"  # noqa: S104 - a pod's own address
    assert config.cluster.ray_address == "auto"
    assert config.store.url is not None
    check_url(plan_store(config.store.url).url)


def test_files_that_the_configuration_names_are_mounted_where_they_are_read(found: list[Document]) -> None:
    config = parse_config(config_of(found), "cluster.yaml")
    read = {
        "frontend": [*config.edge.model_dump().values(), config.store.secret_file],
        "worker": [config.store.secret_file],
    }
    everywhere = [config.cluster.ssl_certfile, config.cluster.ssl_keyfile, config.cluster.ssl_ca_certs]
    for name, pod in pods(found).items():
        [main] = pod["spec"]["containers"]
        mounts = [Path(mount["mountPath"]) for mount in main["volumeMounts"]]
        if name != "frontend" and not name.startswith("worker"):
            continue
        for path in (*read[name.partition("/")[0]], *everywhere):
            if isinstance(path, str) and path.startswith("/etc/"):
                assert Path(path).parent in mounts, f"{name} reads {path}"


def test_a_worker_finds_one_place_in_each_pod_of_its_group(found: list[Document]) -> None:
    groups = {group["groupName"]: group for group in one(found, "RayCluster")["spec"]["workerGroupSpecs"]}
    models = parse_config(config_of(found), "cluster.yaml").models
    for asked in (group for model in models for group in model.groups):
        offers = groups.pop(asked.labels["tidemill-group"])
        assert asked.labels == offers["labels"]
        [(resource, for_each_rank)] = asked.resources.items()
        assert float(offers["resources"][resource]) == for_each_rank * asked.tensor_parallel_size
        assert offers["replicas"] == offers["minReplicas"] == asked.replicas
        assert offers["maxReplicas"] == (asked.replicas_max or asked.replicas)
        assert not resource.endswith("gpu"), "KubeRay would count it as GPUs"
    assert not groups


def test_ranks_of_a_group_are_in_one_pod() -> None:
    values: dict[str, Any] = {
        "clusterTls": {"plain": True},
        "models": [
            {
                "model": "keeper",
                "groups": [
                    {"name": "gpu", "role": "mixed", "tensor_parallel_size": 4, "pod": {"resources": {}}}
                ],
            }
        ],
    }
    [group] = one(documents(CHART, values), "RayCluster")["spec"]["workerGroupSpecs"]
    assert group["resources"] == {"tidemill-gpu-ranks": "4"}


def test_each_command_is_one_that_its_program_takes(
    found: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for pod in pods(found).values():
        for container in containers(pod):
            for words in lines_of(container) if "command" in container else []:
                ran.append(" ".join(words[:3]))
                _check(words, monkeypatch)
    assert any(one.startswith("tidemill serve") for one in ran)
    assert any(one.startswith("ray start") for one in ran)


def _check(words: list[str], patch: pytest.MonkeyPatch) -> None:
    match words:
        case ["tidemill", *rest]:
            assert tidemill(rest)["command"] in ("serve", "store")
        case ["ray", "start", *options]:
            assert ray_start(options)["num_cpus"] == 0
        case ["ray", "health-check", "--address", _]:
            pass
        case ["python", "-m", "tidemill.kvstore.stores.mooncake_memory_owner", *rest]:
            master, num_bytes, host, transport = lends(rest, patch)
            assert (master.rpartition(":")[2], host) == ("50051", "$(POD_IP)")
            assert transport.is_open
            assert num_bytes % 2**30 == 0
        case ["python", "-m", "mooncake.cli", *flags]:
            given = {flag.partition("=")[0] for flag in flags}
            assert given <= _master_flags()
            ours = master_process(Master(host="$(POD_IP)", port=50051, admin_port=9003)).arguments
            assert set(ours[2:]) <= set(flags), "as `tidemill serve --store mooncake` starts it"
        case ["openssl", "x509", *_]:
            pass
        case _:
            pytest.fail(f"who reads {shlex.join(words)}?")


def _master_flags() -> set[str]:
    """What the program of the installed package knows."""
    text = subprocess.run(
        [sys.executable, "-m", "mooncake.cli", "--help"], capture_output=True, text=True, check=False
    ).stdout
    return {f"--{line.split()[0].lstrip('-')}" for line in text.splitlines() if line.startswith("    -")}


def test_kuberay_starts_nodes_with_options_that_ray_takes(found: list[Document]) -> None:
    spec = one(found, "RayCluster")["spec"]
    assert ray_start(["--head", *start_options(spec["headGroupSpec"])])["num_cpus"] == 0
    for group in spec["workerGroupSpecs"]:
        assert ray_start(["--address=head:6379", *start_options(group)])["object_store_memory"] >= 75 << 20


def test_the_frontend_is_told_before_it_is_killed(example: Path, found: list[Document]) -> None:
    """New requests stop when the pod ends; open streams have until SIGTERM, and a moment after it."""
    spec = pods(found)["frontend"]["spec"]
    [frontend] = spec["containers"]
    drain_s = frontend["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert drain_s == values_of(example).get("frontend", {}).get("drainSeconds", 30)
    stops_s = EdgeConfig().shutdown_timeout
    assert drain_s > stops_s
    assert spec["terminationGracePeriodSeconds"] > drain_s + stops_s


def test_probes_ask_for_health(found: list[Document]) -> None:
    [frontend] = pods(found)["frontend"]["spec"]["containers"]
    edge = parse_config(config_of(found), "cluster.yaml").edge
    for name, path in (
        ("startup", "/health/live"),
        ("readiness", "/health/ready"),
        ("liveness", "/health/live"),
    ):
        probe = frontend[f"{name}Probe"]
        if edge.ssl_ca_certs is not None:  # the kubelet has no certificate to show
            assert probe["tcpSocket"] == {"port": "http"}
        else:
            assert probe["httpGet"]["path"] == path
            assert probe["httpGet"].get("scheme", "HTTP") == ("HTTPS" if edge.ssl_certfile else "HTTP")
    assert frontend["startupProbe"]["failureThreshold"] * frontend["startupProbe"]["periodSeconds"] >= 1800


def test_keys_are_in_a_secret_that_tidemill_reads(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(one(documents_of(EVERYTHING), "Secret")["stringData"]["keys.yaml"])
    assert [key.tenant for key in read_keys(keys)] == ["search", "people"]


def test_no_secret_is_in_a_configmap_or_a_command(found: list[Document]) -> None:
    maps = [document for document in found if document["kind"] == "ConfigMap"]
    values = values_of(EVERYTHING)["apiKeys"]["keys"]
    for text in (
        *map(yaml.safe_dump, maps),
        *(yaml.safe_dump(container) for pod in pods(found).values() for container in containers(pod)),
    ):
        assert not any(key["sha256"] in text for key in values)
        assert "PRIVATE KEY" not in text
    for pod in pods(found).values():
        for container in containers(pod):
            for variable in container.get("env", []):
                if any(word in variable["name"] for word in ("TOKEN", "PASSWORD", "SECRET", "KEY_")):
                    assert set(variable) == {"name", "valueFrom"}
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, "for our group, not for everybody"


def test_the_frontend_shows_ray_the_token_of_the_cluster(found: list[Document]) -> None:
    cluster = one(found, "RayCluster")
    options = cluster["spec"]["authOptions"]
    assert options["mode"] == "token"
    for container in containers(pods(found)["frontend"]):
        environ = {variable["name"]: variable for variable in container["env"]}
        if "RAY_HEAD" in environ:
            assert environ["RAY_AUTH_MODE"]["value"] == "token"
            assert environ["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
                "name": options.get("secretName", cluster["metadata"]["name"]),
                "key": "auth_token",
            }
            assert environ["RAY_HEAD"]["value"] == f"{cluster['metadata']['name']}-head-svc:6379"


def test_with_rays_tls_the_frontend_is_in_its_certificate() -> None:
    """KubeRay writes the addresses of pods with these labels into it, and looks at no others."""
    found = documents_of(ENCRYPTED)
    cluster, frontend = one(found, "RayCluster"), pods(found)["frontend"]
    assert cluster["spec"]["tlsOptions"] == {"enabled": True}
    labels = frontend["metadata"]["labels"]
    assert labels["ray.io/cluster"] == cluster["metadata"]["name"]
    assert labels["ray.io/node-type"] == "worker"
    assert labels["ray.io/group"] not in {group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]}
    assert frontend["spec"]["initContainers"][0]["name"] == "wait-for-certificate"
    for example in SERVERS:
        if example != ENCRYPTED:
            assert "ray.io/cluster" not in pods(documents_of(example))["frontend"]["metadata"]["labels"]


def test_the_frontend_starts_anew_with_what_it_serves() -> None:
    base = values_of(EVERYTHING)
    before = pods(documents_of(EVERYTHING))["frontend"]["metadata"]["annotations"]
    for change in (
        {"telemetry": {"log_level": "debug"}},
        {"image": {"tag": "0.2.0"}},
        {"apiKeys": {"keys": base["apiKeys"]["keys"][:1]}},
    ):
        assert pods(documents(CHART, base | change))["frontend"]["metadata"]["annotations"] != before
    same = pods(documents(CHART, base | {"service": {"port": 80}}))["frontend"]["metadata"]["annotations"]
    assert same == before


def test_budgets_leave_the_only_ones_and_let_others_go(found: list[Document], example: Path) -> None:
    budgets = {
        document["metadata"]["name"]: document["spec"]
        for document in found
        if document["kind"] == "PodDisruptionBudget"
    }
    stays = not values_of(example).get("podDisruptionBudget", {}).get("allowInterruption", False)
    assert budgets["chat-tidemill-frontend"]["maxUnavailable"] == int(not stays)
    assert budgets["chat-tidemill-head"]["minAvailable"] == int(stays)
    for group in one(found, "RayCluster")["spec"]["workerGroupSpecs"]:
        budget = budgets[f"chat-tidemill-{group['groupName']}"]
        assert budget["minAvailable"] == group["replicas"] - 1
        assert budget["selector"]["matchLabels"] == {
            "ray.io/cluster": "chat-tidemill",
            "ray.io/group": group["groupName"],
        }
