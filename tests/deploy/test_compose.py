"""The compose file of one machine is valid and confined, and its commands parse."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from tidemill.cluster.cli.main import parser
from tidemill.cluster.cli.serve import config_of_options
from tidemill.cluster.config.tree import RootConfig
from tidemill.kvstore.stores.open_store import check_url

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/compose.yaml"
SERVICES = ("server", "prometheus", "grafana")

Compose = dict[str, Any]


@pytest.fixture
def compose() -> Compose:
    """Return the compose file with the defaults of its variables."""
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", FILE.read_text()))


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest, compose: Compose) -> Compose:
    return compose["services"][request.param]


def test_compose_file_follows_specification(compose: Compose) -> None:
    parsed = PyCompose.from_json(json.dumps(compose))
    assert parsed.services is not None
    assert set(parsed.services) == set(SERVICES)
    compose["services"]["server"]["cap_dorp"] = ["ALL"]
    with pytest.raises(ValueError, match="cap_dorp"):
        PyCompose.from_json(json.dumps(compose))


def test_compose_names_exist_in_file(compose: Compose) -> None:
    for service in compose["services"].values():
        assert set(service["networks"]) <= compose["networks"].keys()
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()
        assert {config["source"] for config in service.get("configs", ())} <= compose["configs"].keys()
        assert service.get("depends_on", {}).keys() <= compose["services"].keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (FILE.parent / source).exists()
            else:
                assert source.startswith("/") or source in compose["volumes"]


def test_compose_service_is_confined(service: Compose) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    uid = int(service["user"].split(":")[0])
    assert uid > 0
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert ":latest" not in service["image"]
    assert ":" in service["image"]


def test_compose_secrets_are_files(compose: Compose) -> None:
    assert all(secret["file"].startswith("./secrets/") for secret in compose["secrets"].values())
    assert "deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    for service in compose["services"].values():
        words = json.dumps([service.get("environment"), service.get("command")])
        assert not re.search(r"sk-|--api-key[ =\"]|PASSWORD\"", words)


def test_compose_mounts_files_of_read_only_services(compose: Compose) -> None:
    """Docker copies `content` and `environment` into a container, which fails with a read-only root."""
    for service in compose["services"].values():
        sources = [compose["secrets"][name] for name in service.get("secrets", ())]
        sources += [compose["configs"][config["source"]] for config in service.get("configs", ())]
        assert all(source.keys() == {"file"} for source in sources)
    for config in compose["configs"].values():
        assert (FILE.parent / config["file"]).is_file()


def test_compose_command_parses(compose: Compose) -> None:
    config = server_config(compose)
    kills_s = int(compose["services"]["server"]["stop_grace_period"].removesuffix("s"))
    assert config.edge.shutdown_timeout + 10 < kills_s, "the workers stop after the last stream"
    assert config.store.url is not None
    check_url(config.store.url)
    secrets = compose["services"]["server"]["secrets"]
    for path in (config.store.secret_file, config.edge.api_keys_file):
        assert str(path).removeprefix("/run/secrets/") in secrets


def test_compose_store_is_in_writable_volume(compose: Compose) -> None:
    folder = re.match(r"file://([^?]*)", str(server_config(compose).store.url))
    assert folder is not None
    targets = [volume.split(":")[1] for volume in compose["services"]["server"]["volumes"]]
    assert any(Path(folder[1]).is_relative_to(target) for target in targets)
    owned = re.search(r"install --directory --owner tidemill --group tidemill (\S+)", _dockerfile())
    assert owned is not None
    assert owned[1] in targets
    assert compose["services"]["server"]["user"] == "10001:10001"


def test_compose_prometheus_and_grafana_find_their_sources(compose: Compose) -> None:
    scraped = _config(compose, "prometheus")["scrape_configs"]
    assert [job["static_configs"] for job in scraped] == [[{"targets": ["server:8000"]}]]
    [source] = _config(compose, "datasource")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    standalone = yaml.safe_load(
        (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    assert [{**source, "url": ""}] == [{**other, "url": ""} for other in standalone]
    folder = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/tidemill.yaml").read_text())
    [provider] = folder["providers"]
    targets = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/tidemill.json" in targets


def server_config(compose: Compose) -> RootConfig:
    """Return the configuration that `tidemill serve` parses from the server's command."""
    return config_of_options(parser().parse_args(compose["services"]["server"]["command"]))


def _config(compose: Compose, name: str) -> dict[str, Any]:
    return yaml.safe_load((FILE.parent / compose["configs"][name]["file"]).read_text())


def _dockerfile() -> str:
    return (ROOT / "deploy/docker/Dockerfile").read_text()
