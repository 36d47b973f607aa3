"""The Dockerfile passes hadolint; images have the right contents, user and metadata."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from benchmarks.peers.servers import VLLM

from tidemill.workers.vllm.settings import VERSION_MIN

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
TARGETS = ("cpu", "cuda")
BESIDE_VLLM = "vllm"

Step = tuple[str, str]


def steps() -> list[Step]:
    """Return the instructions with their text; lines are joined, comments are left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def stages() -> dict[str, tuple[str, list[Step]]]:
    """Return the base and the steps of each stage by name."""
    result: dict[str, tuple[str, list[Step]]] = {}
    name = ""
    for instruction, text in steps():
        if instruction == "FROM":
            base, _, name = text.split()
            result[name] = (base, [])
        elif name:
            result[name][1].append((instruction, text))
    return result


def lineage(name: str) -> list[Step]:
    """Return the steps of a stage, after those of its bases."""
    if name not in stages():
        return []
    base, own = stages()[name]
    return [*lineage(base), *own]


@pytest.fixture(params=(*TARGETS, BESIDE_VLLM))
def image(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


def test_dockerfile_passes_hadolint() -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), "--format", "json", str(DOCKERFILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == []


def test_dockerfile_base_is_one_release_and_an_argument() -> None:
    assert ("ARG", "BASE=debian:12.12-slim") in steps()
    bases = {base for base, _ in stages().values()}
    assert bases - stages().keys() == {"${BASE}", "${VLLM}"}


def test_image_has_unprivileged_user_volume_health_check_and_labels(image: str) -> None:
    [made] = [text for _, text in lineage(image) if "useradd" in text]
    assert "--uid 10001 --gid 10001" in made
    result = dict(lineage(image))
    assert result["USER"] == "10001:10001"
    assert result["VOLUME"] == "/tmp"  # noqa: S108 - of the image
    assert "/health/ready" in result["HEALTHCHECK"]
    assert json.loads(result["ENTRYPOINT"])[-1] == "tidemill"
    labels = {text.partition("=")[0] for text in result["LABEL"].split("org.opencontainers.image.")[1:]}
    assert labels == {"title", "description", "licenses", "version", "revision"}


def test_image_copies_only_environment_and_package_list(target: str) -> None:
    """The compiler of the wheel stays in its stage."""
    copies = [text for instruction, text in lineage(target) if instruction == "COPY"]
    assert copies == [
        f"--from=install-{target} /opt/tidemill /opt/tidemill",
        f"--from=install-{target} /opt/sbom.json /usr/share/tidemill/sbom.json",
    ]
    assert not any("g++" in text for _, text in lineage(target))


def test_image_beside_vllm_leaves_the_packages_of_vllm(tmp_path: Path) -> None:
    """The environment of Tidemill sees them; pip never meets another torch, and adds the connector alone to
    those of vLLM."""
    [release] = [text for name, text in steps() if name == "ARG" and text.startswith("VLLM=")]
    assert release == f"VLLM=vllm/vllm-openai:v{VLLM}"
    assert tuple(map(int, VLLM.split(".")[:2])) >= VERSION_MIN
    [run] = [text for name, text in stages()[BESIDE_VLLM][1] if name == "RUN" and "venv" in text]
    commands = [command.split() for command in run.split("&&")]
    installs = [words for words in commands if words[1:3] == ["install", "--no-cache-dir"]]
    assert [words[0] for words in installs] == ["/opt/tidemill/bin/pip"]
    into_vllm = [words for words in commands if words[:4] == ["python3", "-m", "pip", "install"]]
    assert [{"--no-deps", "blake3", "xxhash"} <= {*words} for words in into_vllm] == [True]
    (tmp_path / "constraints.txt").write_text((ROOT / "constraints.txt").read_text())
    [edit] = [" ".join(words) for words in commands if words[0] == "sed"]
    subprocess.run(["/bin/sh", "-c", edit.replace("/wheels", str(tmp_path))], check=True)
    left = (tmp_path / "constraints.txt").read_text()
    assert "\ntorch==" in (ROOT / "constraints.txt").read_text()
    assert not re.search("^torch==", left, re.MULTILINE)
    assert re.search("^ray==", left, re.MULTILINE), "as in values.yaml"


def test_cuda_image_links_kvcached_to_driver() -> None:
    """g++ would not link an unused library, like the empty one that stands for the driver."""
    [built] = [text for _, text in lineage("install-cuda") if "--no-build-isolation" in text]
    assert "LDFLAGS=-Wl,--no-as-needed /opt/tidemill/bin/pip install --no-build-isolation" in built
    assert re.search(r"grep -q libcuda\.so\.1 \S+/kvcached/_C\.\*\.so", built)
    own = stages()["cuda"][1]
    assert any(instruction == "RUN" and "ibverbs-providers" in text for instruction, text in own)
    folder = "/opt/tidemill/lib/python3.11/site-packages/nvidia/cu13/lib"
    assert any(instruction == "ENV" and f"LD_LIBRARY_PATH={folder}" in text for instruction, text in own)
    assert folder in built  # the folder of the runtime when kvcached was linked


def test_images_pin_everything_that_pip_installs() -> None:
    environment = " ".join(text for instruction, text in lineage("wheel") if instruction == "ENV")
    assert "PIP_CONSTRAINT=/build/constraints.txt" in environment
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [*extras["mooncake"], *extras["otel"], *extras["gpu"], "cyclonedx-bom", "torch"]
    assert {re.split(r"[^\w.-]", requirement)[0] for requirement in named} <= set(pinned)


def test_build_context_has_only_sources_of_wheel() -> None:
    """The context is a list of folders without keys, environments and caches."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    assert sent == {
        *("cluster", "connect", "kernels", "kvstore", "src", "workers"),
        *("LICENSE", "README.md", "constraints.txt", "pyproject.toml", "setup.py"),
    }


def test_files_name_the_newest_release() -> None:
    """A release is made from the tag of this version: tools/release.py."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version = re.findall(r"^## (\d\S*)", changelog, re.MULTILINE)[0]
    assert any(instruction == "ARG" and f"VERSION={version}" in text for instruction, text in steps())
    assert f'LAST_RELEASE = "{version}"\n' in (ROOT / "setup.py").read_text()
    for chart in sorted((ROOT / "deploy/helm").glob("*/Chart.yaml")):
        lines = chart.read_text().splitlines()
        assert f"version: {version}" in lines
        assert f'appVersion: "{version}"' in lines
    for file in ("deploy/docker/Dockerfile", "deploy/compose.yaml", "deploy/try.sh", "docs/install.md"):
        assert set(re.findall(r"\btidemill:(\d[\d.]*\d)", (ROOT / file).read_text())) == {version}
