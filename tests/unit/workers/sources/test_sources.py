"""Names of models, and downloads from a hub, a web server and an object store, all of them real servers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from huggingface_hub import constants
from moto.server import ThreadedMotoServer

from tests.support.workers.model_hub import COMMIT, TOKEN, Hub, model_hub
from tests.unit.workers.sources.test_gguf import write
from tidemill.workers.engine.build import with_model_here
from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources import remote_files
from tidemill.workers.sources.download import download
from tidemill.workers.sources.names import ModelSource, SourceError, bundled, local_folder, source_of

KEEPER = bundled()["keeper"]
NEEDED = {
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "chat_template.jinja"),
}
BUCKET = "models"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with keeper as org/keeper, beside files that are not needed."""
    folder = shutil.copytree(KEEPER, tmp_path / "hub")
    (folder / "pytorch_model.bin").write_bytes(b"weights in another format")
    with model_hub(Hub({"org/keeper": folder})) as hub:
        point_at(hub.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield hub


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what HF_ENDPOINT does, which huggingface_hub reads when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    files = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + files)


def source(model: str, *, revision: str | None = None, folder: Path | None = None) -> ModelSource:
    found = source_of(model, revision, folder)
    assert found is not None
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def bodies(hub: Hub) -> list[str]:
    return [line for line in hub.asked if line.startswith("GET /org/keeper/resolve")]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name", ModelSource("hf", "org/name")),
        ("org/name@v1", ModelSource("hf", "org/name", "v1")),
        ("hf://org/na.me-2@v1", ModelSource("hf", "org/na.me-2", "v1")),
        ("s3://bucket/a/b/", ModelSource("s3", "bucket/a/b")),
        ("https://host:1/a", ModelSource("https", "host:1/a")),
        ("keeper", None),
        ("/a/b", None),
        ("./a/b", None),
        ("name", None),
        ("a/b/c", None),
    ],
)
def test_name_means_a_folder_or_a_place(model: str, expected: ModelSource | None) -> None:
    assert source_of(model) == expected


def test_folder_that_exists_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert source_of("org/name") is not None
    (tmp_path / "org/name").mkdir(parents=True)
    assert source_of("org/name") is None
    assert local_folder("org/name") == Path("org/name")


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("hf://name", None, "write hf://ORG/NAME"),
        ("org/name@v1", "v2", "give one"),
        ("s3://a/b", "v1", "leave it out"),
        ("keeper", "v1", "leave out --revision"),
    ],
)
def test_contradiction_is_refused(model: str, revision: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        source_of(model, revision)


def test_hub_sends_each_needed_file_once(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="`hf download org/keeper` does it"):
        download(source("org/keeper"), offline=True)
    folder = download(source("org/keeper"))
    assert names(folder) >= NEEDED
    assert "pytorch_model.bin" not in names(folder)
    assert (folder / "model.safetensors").read_bytes() == (KEEPER / "model.safetensors").read_bytes()
    hub.asked.clear()
    assert download(source("org/keeper")) == folder
    assert not bodies(hub)
    assert download(source("org/keeper"), offline=True) == folder
    pinned = source("org/keeper").pinned(folder)
    assert pinned.revision == COMMIT
    settings = EngineSettings(
        model_folder=tmp_path / "on another node",
        model_source=pinned,
        cache_folder=tmp_path,
        store_url="memory:",
    )
    assert with_model_here(settings).model_folder == folder


def test_download_goes_on_where_it_broke_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65536)
    hub.cuts["model.safetensors"] = [100_000]
    folder = download(source("org/keeper"))
    assert (folder / "model.safetensors").read_bytes() == (KEEPER / "model.safetensors").read_bytes()
    [_, rest] = [line for line in bodies(hub) if "model.safetensors" in line]
    assert rest.endswith("bytes=65536-")


def test_file_that_is_complete_is_not_asked_for_again(hub: Hub) -> None:
    hub.cuts["model.safetensors"] = [0] * 100
    with pytest.raises(SourceError, match="the same command goes on"):
        download(source("org/keeper"))
    hub.cuts.clear()
    hub.asked.clear()
    assert names(download(source("org/keeper"))) >= NEEDED
    [_] = bodies(hub)


def test_hub_refuses_in_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for model, message in (("org/other", "there is no model org/other"), ("org/keeper@v9", "no revision v9")):
        with pytest.raises(SourceError, match=message) as raised:
            download(source(model))
        assert "\n" not in str(raised.value)
    hub.gated.add("org/keeper")
    with pytest.raises(SourceError, match="is gated: accept its terms"):
        download(source("org/keeper"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert names(download(source("org/keeper"))) >= NEEDED


@pytest.mark.usefixtures("hub")
def test_hub_that_is_away_matters_only_without_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = download(source("org/keeper"))
    point_at("http://127.0.0.1:9", monkeypatch)
    assert download(source("org/keeper")) == folder
    with pytest.raises(SourceError, match="cannot be reached, and org/keeper is not in the cache"):
        download(source("org/keeper", folder=tmp_path / "empty"))


def test_web_server_sends_what_is_asked_for_by_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "BLOCK_BYTES", 65536)
    monkeypatch.setattr(remote_files, "RETRY_S", 0.0)
    place = source(f"{hub.url}/org/keeper/resolve/main", folder=tmp_path / "models")
    hub.cuts["model.safetensors"] = [100_000] * remote_files.ATTEMPTS_MAX
    with pytest.raises(SourceError, match="broke off after 65536 of"):
        download(place)
    hub.asked.clear()
    folder = download(place)
    assert {path for path in names(folder) if not path.startswith(".")} == NEEDED | {"tokenizer_config.json"}
    for name in NEEDED:
        assert (folder / name).read_bytes() == (KEEPER / name).read_bytes()
    ranges = [line.rpartition(" ")[2] for line in bodies(hub) if "model.safetensors bytes" in line]
    assert ranges[0] == "bytes=65536-131071"
    with pytest.raises(SourceError, match=r"there is no config\.json"):
        download(source(f"{hub.url}/org/keeper/nothing", folder=tmp_path / "models"))


def test_the_pooling_of_an_embedder_comes_with_it(hub: Hub, tmp_path: Path) -> None:
    made = {
        "config.json",
        "modules.json",
        "model.safetensors",
        "1_Pooling/config.json",
        "2_Dense/config.json",
    }
    for name in made:
        (tmp_path / "made" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / name).write_text(name)
    hub.repositories["org/embedder"] = tmp_path / "made"
    places = (source("org/embedder"), source(f"{hub.url}/org/embedder/resolve/main", folder=tmp_path))
    for folder in map(download, places):
        assert (folder / "1_Pooling" / "config.json").read_text() == "1_Pooling/config.json"
        assert "2_Dense" not in names(folder)


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(name, value)
        files: Any = s3fs.S3FileSystem()
        files.mkdir(BUCKET)
        yield files
    server.stop()


def test_object_store_sends_what_has_changed(
    bucket: Any,  # noqa: ANN401 - a file system of fsspec, without types
    tmp_path: Path,
) -> None:
    for path in KEEPER.iterdir():
        if path.is_file():
            bucket.put_file(str(path), f"{BUCKET}/keeper/{path.name}")
    bucket.pipe_file(f"{BUCKET}/keeper/original/weights.safetensors", b"a folder that is not read")
    place = source(f"s3://{BUCKET}/keeper", folder=tmp_path)
    folder = download(place)
    assert names(folder) >= NEEDED
    assert (folder / "model.safetensors").read_bytes() == (KEEPER / "model.safetensors").read_bytes()
    times = {name: (folder / name).stat().st_mtime_ns for name in NEEDED}
    config = {**json.loads((KEEPER / "config.json").read_text()), "changed": True}
    bucket.pipe_file(f"{BUCKET}/keeper/config.json", json.dumps(config).encode())
    assert download(place) == folder
    assert json.loads((folder / "config.json").read_text())["changed"]
    for name in NEEDED - {"config.json"}:
        assert (folder / name).stat().st_mtime_ns == times[name]
    with pytest.raises(SourceError, match=r"there is no config\.json"):
        download(source(f"s3://{BUCKET}/nothing", folder=tmp_path))


def test_hub_sends_the_gguf_file_that_is_named(hub: Hub, tmp_path: Path) -> None:
    for name in ("m-Q8_0.gguf", "m-Q4_0.gguf"):
        write(tmp_path / "hub" / name)
    folder = download(source("hf://org/keeper:Q8_0", folder=tmp_path / "cache"))
    assert (folder / "m-Q8_0.gguf").exists()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert source("hf://org/keeper:Q8_0").pinned(folder).revision == COMMIT
    assert not [line for line in bodies(hub) if "Q4_0" in line or "model.safetensors" in line]
    with pytest.raises(SourceError, match="no GGUF file of this name: write hf://org/keeper:FILE"):
        download(source("hf://org/keeper:Q6_K", folder=tmp_path / "cache"))
    with pytest.raises(SourceError, match=r"has m-Q4_0.gguf, m-Q8_0.gguf: write"):
        download(source("hf://org/keeper:m-", folder=tmp_path / "cache"))
