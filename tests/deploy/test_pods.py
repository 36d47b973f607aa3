"""The commands, security and files of the pods of the chart."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.chart import (
    CHART,
    SERVERS,
    Document,
    all_values_of,
    config_of,
    config_text,
    containers,
    documents,
    documents_of,
    find_one,
    pods,
    render,
    values_of,
)
from tests.support.deploy.commands import lends, lines_of, ray_start, start_options, tidemill
from tidemill.cluster.config.fleets import Surroundings, cluster_settings
from tidemill.cluster.config.tree import EdgeConfig
from tidemill.cluster.edge.requests.api_keys import read_keys
from tidemill.cluster.processes.store_plan import master_program, plan_store
from tidemill.kvstore.stores.open_store import check_url
from tidemill.workers.vllm.settings import VllmSettings

EVERYTHING = next(example for example in SERVERS if example.stem == "2p4d")
BESIDE_VLLM = next(example for example in SERVERS if example.stem == "vllm")
ENCRYPTED = next(example for example in SERVERS if example.stem == "encrypted")
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]


@pytest.fixture(params=SERVERS, ids=lambda example: example.stem)
def example(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def found(example: Path) -> list[Document]:
    return documents_of(example)


def test_pods_run_unprivileged_with_read_only_root_and_no_kubernetes_token(found: list[Document]) -> None:
    """A head in which Ray's autoscaler runs has a token, and the autoscaler the security of the head."""
    assert {"frontend", "head"} < set(pods(found))
    cluster = find_one(found, "RayCluster")["spec"]
    scales = cluster.get("enableInTreeAutoscaling", False)
    if scales:
        [head] = containers(pods(found)["head"])
        assert cluster["autoscalerOptions"]["securityContext"] == head["securityContext"]
    for name, pod in pods(found).items():
        assert pod["spec"].get("automountServiceAccountToken", True) is (scales and name == "head")
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


def test_mounts_are_unique_and_have_volumes(found: list[Document]) -> None:
    for pod in pods(found).values():
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        assert len(set(volumes)) == len(volumes)
        for container in containers(pod):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths)
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= set(volumes)
        used = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert used == set(volumes)


def test_sources_of_volumes_exist(found: list[Document], example: Path) -> None:
    """A source is in the chart or named in its values; KubeRay makes the certificate of Ray's pods."""
    created = {(document["kind"], document["metadata"]["name"]) for document in found}
    cluster = find_one(found, "RayCluster")["metadata"]["name"]
    named = {("Secret", f"ray-worker-secret-{cluster}")}
    named |= {("Secret", word) for word in re.findall(r"[\w.-]+", example.read_text())}
    for pod in pods(found).values():
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in created
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in created | named


def test_configmap_has_valid_configuration(found: list[Document]) -> None:
    config = config_of(found)
    assert config.edge.host == "0.0.0.0"  # noqa: S104 - a pod's own address
    assert config.cluster.ray_address == "auto"
    if config.store.url is None:
        assert not any(model.adapter.is_own for model in config.models), "our own engine needs a store"
    else:
        check_url(plan_store(config.store.url).url)


def test_values_of_models_reach_configuration_and_pods(found: list[Document], example: Path) -> None:
    """The chart adds what ties a group to its pods, and moves `pod` to them."""
    models = all_values_of(example)["models"]
    configured = yaml.safe_load(config_text(found))["models"]
    for group in (group for model in configured for group in model["groups"]):
        assert {*group.pop("labels"), *group.pop("resources")}
    for group in (group for model in models for group in model["groups"]):
        pod, wanted = pods(found)[f"worker/{group.pop('name')}"]["spec"], group.pop("pod")
        [worker] = pod["containers"]
        assert worker["resources"] == wanted["resources"]
        assert all(variable in worker["env"] for variable in wanted.get("env", ()))
        assert all(pod[key] == value for key, value in wanted.items() if key not in ("resources", "env"))
    assert configured == models


def test_values_of_vllm_reach_its_workers() -> None:
    """A pod has the GPUs of all ranks of a vLLM, which one process of Ray asks for, and its cache stays."""
    found = documents_of(BESIDE_VLLM)
    config = config_of(found)
    [model] = config.models
    settings = cluster_settings(config, Surroundings(store_url="file:///pages", cache_folder=Path()))
    first, second = settings.fleets[0].workers
    [spec] = find_one(found, "RayCluster")["spec"]["workerGroupSpecs"]
    [worker] = spec["template"]["spec"]["containers"]
    assert isinstance(first.engine, VllmSettings)
    assert first.engine.python == Path("/usr/bin/python3")
    assert first.engine.args == model.adapter.args == values_of(BESIDE_VLLM)["models"][0]["adapter"]["args"]
    assert first.num_gpus == first.engine.ranks == int(worker["resources"]["limits"]["nvidia.com/gpu"])
    assert first.resources == {name: int(units) for name, units in spec["resources"].items()}
    assert (first.labels, spec["replicas"]) == (spec["labels"], len((first, second)))
    kept = {mount["name"]: mount["mountPath"] for mount in worker["volumeMounts"]}["kernels"]
    assert {"name": "VLLM_CACHE_ROOT", "value": f"{kept}/vllm"} in worker["env"]
    assert config.store.url is None


def test_values_of_the_release_reach_every_pod(found: list[Document], example: Path) -> None:
    values = all_values_of(example)
    image = f"{values['image']['repository']}:{values['image']['tag'] or VERSION}"
    mounted = {
        "models": values["modelVolume"],
        "pages": values["store"]["folder"]["volume"],
        "cluster-tls": values["clusterTls"]["existingSecret"],
        "store-secret": values["store"]["secret"]["existingSecret"],
    }
    for name, pod in pods(found).items():
        assert {container["image"] for container in containers(pod)} == {image}
        assert pod["spec"].get("imagePullSecrets", []) == values["imagePullSecrets"]
        own = "" if name == "head" else values["serviceAccountName"]  # KubeRay makes that of the autoscaler
        assert pod["spec"].get("serviceAccountName", "") == own
        if name == "frontend" or name.startswith("worker"):
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
            assert {volume for volume, source in mounted.items() if source} == mounted.keys() & volumes.keys()
            for volume in mounted.keys() & volumes.keys():
                source = {key: value for key, value in volumes[volume].items() if key != "name"}
                assert mounted[volume] in (source, source.get("secret", {}).get("secretName"))


def test_notes_name_the_port_and_the_feature_gates_of_kuberay(example: Path) -> None:
    values = all_values_of(example)
    notes = render(CHART, values)["templates/NOTES.txt"]
    assert f"port-forward service/chat-tidemill {values['service']['port']}\n" in notes
    assert ("RayClusterNetworkPolicy" in notes) is values["networkPolicy"]["enabled"]
    assert ("RayClusterMTLS" in notes) is values["ray"]["tls"]["enabled"]


def test_files_named_in_configuration_are_mounted(found: list[Document]) -> None:
    config = config_of(found)
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


def test_each_pod_of_group_fits_one_worker_or_its_part_of_one(found: list[Document]) -> None:
    groups = {
        group["groupName"]: group for group in find_one(found, "RayCluster")["spec"]["workerGroupSpecs"]
    }
    models = config_of(found).models
    for wanted in (group for model in models for group in model.groups):
        offers = groups.pop(wanted.labels["tidemill-group"])
        assert wanted.labels == offers["labels"]
        [(resource, for_each_rank)] = wanted.resources.items()
        nodes = wanted.tensor_parallel_nodes
        assert float(offers["resources"][resource]) == for_each_rank * wanted.tensor_parallel_size / nodes
        assert offers.get("numOfHosts", 1) == nodes
        assert offers["replicas"] == offers["minReplicas"] == wanted.replicas
        assert offers["maxReplicas"] == (wanted.replicas_max or wanted.replicas)
        assert not resource.endswith("gpu"), "KubeRay would count it as GPUs"
    assert not groups


def test_commands_are_accepted_by_their_programs(
    found: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []
    for pod in pods(found).values():
        for container in containers(pod):
            for words in lines_of(container) if "command" in container else []:
                commands.append(" ".join(words[:3]))
                _check(words, monkeypatch)
    assert any(command.startswith("tidemill serve") for command in commands)
    assert any(command.startswith("ray start") for command in commands)


def _check(words: list[str], patch: pytest.MonkeyPatch) -> None:
    match words:
        case ["tini", "--", "tidemill", *rest] | ["tidemill", *rest]:
            assert tidemill(rest)["command"] in ("serve", "edge", "store")
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
            names = {flag.partition("=")[0] for flag in flags}
            assert names <= _master_flags()
            arguments = master_program("$(POD_IP)", 50051, 9003).arguments
            assert set(arguments[2:]) <= set(flags), "as `tidemill serve --store mooncake` starts it"
        case ["openssl", "x509", *_]:
            pass
        case _:
            pytest.fail(f"unknown program: {shlex.join(words)}")


def _master_flags() -> set[str]:
    """Return the flags of the master in the installed package."""
    text = subprocess.run(
        [sys.executable, "-m", "mooncake.cli", "--help"], capture_output=True, text=True, check=False
    ).stdout
    return {f"--{line.split()[0].lstrip('-')}" for line in text.splitlines() if line.startswith("    -")}


def test_ray_start_params_are_accepted_by_ray(found: list[Document]) -> None:
    spec = find_one(found, "RayCluster")["spec"]
    assert ray_start(["--head", *start_options(spec["headGroupSpec"])])["num_cpus"] == 0
    for group in spec["workerGroupSpecs"]:
        assert ray_start(["--address=head:6379", *start_options(group)])["object_store_memory"] >= 75 << 20


def test_frontend_drains_before_it_is_killed(example: Path, found: list[Document]) -> None:
    """New requests stop when the pod ends; open streams have until shortly after SIGTERM."""
    spec = pods(found)["frontend"]["spec"]
    [frontend] = spec["containers"]
    drain_s = frontend["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert drain_s == values_of(example).get("frontend", {}).get("drainSeconds", 30)
    stops_s = EdgeConfig().shutdown_timeout
    assert drain_s > stops_s
    assert spec["terminationGracePeriodSeconds"] > drain_s + stops_s


def test_frontend_probes_check_health(found: list[Document]) -> None:
    [frontend] = pods(found)["frontend"]["spec"]["containers"]
    edge = config_of(found).edge
    for name, path in (
        ("startup", "/health/live"),
        ("readiness", "/health/ready"),
        ("liveness", "/health/live"),
    ):
        probe = frontend[f"{name}Probe"]
        if edge.ssl_ca_certs is not None:  # the kubelet has no client certificate
            assert probe["tcpSocket"] == {"port": "http"}
        else:
            assert probe["httpGet"]["path"] == path
            assert probe["httpGet"].get("scheme", "HTTP") == ("HTTPS" if edge.ssl_certfile else "HTTP")
    assert frontend["startupProbe"]["failureThreshold"] * frontend["startupProbe"]["periodSeconds"] >= 1800


def test_api_keys_secret_is_readable_keys_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(find_one(documents_of(EVERYTHING), "Secret")["stringData"]["keys.yaml"])
    assert [key.tenant for key in read_keys(keys)] == ["search", "people"]


def test_configmaps_and_commands_have_no_secrets(found: list[Document]) -> None:
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
                assert volume["secret"]["defaultMode"] == 0o440, "readable for our group, not for others"


def test_frontend_has_ray_token_of_cluster(found: list[Document]) -> None:
    cluster = find_one(found, "RayCluster")
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


def test_frontend_is_in_ray_certificate_with_ray_tls() -> None:
    """KubeRay writes only the addresses of pods with these labels into the certificate."""
    found = documents_of(ENCRYPTED)
    cluster, frontend = find_one(found, "RayCluster"), pods(found)["frontend"]
    assert cluster["spec"]["tlsOptions"] == {"enabled": True}
    labels = frontend["metadata"]["labels"]
    assert labels["ray.io/cluster"] == cluster["metadata"]["name"]
    assert labels["ray.io/node-type"] == "worker"
    assert labels["ray.io/group"] not in {group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]}
    first, *others = containers(frontend)
    assert first["name"] == "wait-for-certificate"
    for container in others:
        environ = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert environ["RAY_USE_TLS"] == "1"
        files = {"SERVER_CERT": "tls.crt", "SERVER_KEY": "tls.key", "CA_CERT": "ca.crt"}
        assert all(environ[f"RAY_TLS_{name}"] == f"/etc/ray/tls/{file}" for name, file in files.items())
    assert all(
        "/etc/ray/tls" in [mount["mountPath"] for mount in container["volumeMounts"]]
        for container in (first, *others)
    )
    for example in SERVERS:
        if example != ENCRYPTED:
            assert "ray.io/cluster" not in pods(documents_of(example))["frontend"]["metadata"]["labels"]


def test_frontend_restarts_when_its_configuration_changes() -> None:
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


def test_disruption_budgets_protect_single_pods(found: list[Document], example: Path) -> None:
    budgets = {
        document["metadata"]["name"]: document["spec"]
        for document in found
        if document["kind"] == "PodDisruptionBudget"
    }
    stays = not values_of(example).get("podDisruptionBudget", {}).get("allowInterruption", False)
    assert budgets["chat-tidemill-frontend"]["maxUnavailable"] == int(not stays)
    assert budgets["chat-tidemill-head"]["minAvailable"] == int(stays)
    for group in find_one(found, "RayCluster")["spec"]["workerGroupSpecs"]:
        budget = budgets[f"chat-tidemill-{group['groupName']}"]
        assert budget["minAvailable"] == group["replicas"] * group.get("numOfHosts", 1) - 1
        assert budget["selector"]["matchLabels"] == {
            "ray.io/cluster": "chat-tidemill",
            "ray.io/group": group["groupName"],
        }
