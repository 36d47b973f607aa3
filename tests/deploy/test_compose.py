"""The compose file of one machine: by the specification, tight, and with commands that the programs take."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from tidemill.cluster.cli.main import parser
from tidemill.cluster.cli.serve import settled
from tidemill.cluster.config.tree import RootConfig
from tidemill.kvstore.stores.open_store import check_url

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/compose.yaml"
SERVICES = ("server", "prometheus", "grafana")

Compose = dict[str, Any]


@pytest.fixture
def compose() -> Compose:
    """With what its variables are by default."""
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", FILE.read_text()))


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest, compose: Compose) -> Compose:
    return compose["services"][request.param]


def test_it_is_what_the_specification_says(compose: Compose) -> None:
    found = PyCompose.from_json(json.dumps(compose))
    assert found.services is not None
    assert set(found.services) == set(SERVICES)
    compose["services"]["server"]["cap_dorp"] = ["ALL"]
    with pytest.raises(ValueError, match="cap_dorp"):
        PyCompose.from_json(json.dumps(compose))


def test_every_name_is_of_something_in_the_file(compose: Compose) -> None:
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


def test_a_service_may_do_little(service: Compose) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    uid = int(service["user"].split(":")[0])
    assert uid > 0
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert ":latest" not in service["image"]
    assert ":" in service["image"]


def test_secrets_are_files(compose: Compose) -> None:
    assert all(secret["file"].startswith("./secrets/") for secret in compose["secrets"].values())
    assert "deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    for service in compose["services"].values():
        words = json.dumps([service.get("environment"), service.get("command")])
        assert not re.search(r"sk-|--api-key[ =\"]|PASSWORD\"", words)


def test_what_a_read_only_service_reads_is_mounted(compose: Compose) -> None:
    """Docker copies `content` and `environment` into a container before it starts: it refuses to, with a
    read-only root, and only when it comes to it."""
    for service in compose["services"].values():
        given = [compose["secrets"][name] for name in service.get("secrets", ())]
        given += [compose["configs"][config["source"]] for config in service.get("configs", ())]
        assert all(one.keys() == {"file"} for one in given)
    for config in compose["configs"].values():
        assert (FILE.parent / config["file"]).is_file()


def test_the_server_takes_its_command(compose: Compose) -> None:
    config = served(compose)
    kills_s = int(compose["services"]["server"]["stop_grace_period"].removesuffix("s"))
    assert config.edge.shutdown_timeout + 10 < kills_s, "the workers stop after the answers"
    assert config.store.url is not None
    check_url(config.store.url)
    secrets = compose["services"]["server"]["secrets"]
    for path in (config.store.secret_file, config.edge.api_keys_file):
        assert str(path).removeprefix("/run/secrets/") in secrets


def test_what_is_kept_lies_where_the_image_lets_it(compose: Compose) -> None:
    folder = re.match(r"file://([^?]*)", str(served(compose).store.url))
    assert folder is not None
    places = [volume.split(":")[1] for volume in compose["services"]["server"]["volumes"]]
    assert any(Path(folder[1]).is_relative_to(place) for place in places)
    owned = re.search(r"install --directory --owner tidemill --group tidemill (\S+)", _dockerfile())
    assert owned is not None
    assert owned[1] in places
    assert compose["services"]["server"]["user"] == "10001:10001"


def test_prometheus_and_grafana_find_their_sources(compose: Compose) -> None:
    scraped = _config(compose, "prometheus")["scrape_configs"]
    assert [job["static_configs"] for job in scraped] == [[{"targets": ["server:8000"]}]]
    [source] = _config(compose, "datasource")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    alone = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert [{**source, "url": ""}] == [{**one, "url": ""} for one in alone]
    folder = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/tidemill.yaml").read_text())
    [provider] = folder["providers"]
    places = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/tidemill.json" in places


def served(compose: Compose) -> RootConfig:
    """What the server is told, as `tidemill serve` understands it."""
    return settled(parser().parse_args(compose["services"]["server"]["command"]))


def _config(compose: Compose, name: str) -> dict[str, Any]:
    return yaml.safe_load((FILE.parent / compose["configs"][name]["file"]).read_text())


def _dockerfile() -> str:
    return (ROOT / "deploy/docker/Dockerfile").read_text()
