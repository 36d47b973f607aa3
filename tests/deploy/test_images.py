"""The Dockerfile: what hadolint says, what goes into images, and who may do what in them."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
TARGETS = ("cpu", "cuda")

Step = tuple[str, str]


def steps() -> list[Step]:
    """Instructions and their text, lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def stages() -> dict[str, tuple[str, list[Step]]]:
    """By name: what a stage is built on, and its steps."""
    found: dict[str, tuple[str, list[Step]]] = {}
    name = ""
    for instruction, text in steps():
        if instruction == "FROM":
            base, _, name = text.split()
            found[name] = (base, [])
        elif name:
            found[name][1].append((instruction, text))
    return found


def lineage(name: str) -> list[Step]:
    """The steps that made a stage, those of its bases first."""
    if name not in stages():
        return []
    base, own = stages()[name]
    return [*lineage(base), *own]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


def test_hadolint_has_nothing_to_say() -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), "--format", "json", str(DOCKERFILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == []


def test_the_base_is_one_release_and_can_be_a_digest() -> None:
    assert ("ARG", "BASE=debian:12.12-slim") in steps()
    bases = {base for base, _ in stages().values()}
    assert bases - stages().keys() == {"${BASE}"}


def test_an_image_runs_as_nobody_in_particular(target: str) -> None:
    users = [text for instruction, text in lineage(target) if instruction == "USER"]
    assert users[-1] == "10001:10001"
    [made] = [text for _, text in lineage(target) if "useradd" in text]
    assert "--uid 10001 --gid 10001" in made


def test_an_image_says_where_it_writes_and_how_it_is(target: str) -> None:
    found = dict(lineage(target))
    assert found["VOLUME"] == "/tmp"  # noqa: S108 - of the image
    assert "/health/ready" in found["HEALTHCHECK"]
    assert json.loads(found["ENTRYPOINT"])[-1] == "tidemill"
    labels = {text.partition("=")[0] for text in found["LABEL"].split("org.opencontainers.image.")[1:]}
    assert labels == {"title", "description", "licenses", "version", "revision"}


def test_an_image_has_no_compiler_of_the_wheel_and_lists_its_packages(target: str) -> None:
    """Only the environment and its list come over from where things are built."""
    copies = [text for instruction, text in lineage(target) if instruction == "COPY"]
    assert copies == [
        f"--from=install-{target} /opt/tidemill /opt/tidemill",
        f"--from=install-{target} /opt/sbom.json /usr/share/tidemill/sbom.json",
    ]
    assert not any("g++" in text for _, text in lineage(target))


def test_the_cuda_image_loads_what_is_compiled_against_the_driver_and_cuda() -> None:
    """g++ leaves out a library that nothing is used of, as of the empty one that stands for the driver."""
    [built] = [text for _, text in lineage("install-cuda") if "--no-build-isolation" in text]
    assert "LDFLAGS=-Wl,--no-as-needed /opt/tidemill/bin/pip install --no-build-isolation" in built
    assert re.search(r"grep -q libcuda\.so\.1 \S+/kvcached/_C\.\*\.so", built)
    own = stages()["cuda"][1]
    assert any(instruction == "RUN" and "ibverbs-providers" in text for instruction, text in own)
    folder = "/opt/tidemill/lib/python3.11/site-packages/nvidia/cu13/lib"
    assert any(instruction == "ENV" and f"LD_LIBRARY_PATH={folder}" in text for instruction, text in own)
    assert folder in built  # where the runtime was when kvcached was linked


def test_everything_that_pip_installs_is_pinned() -> None:
    environment = " ".join(text for instruction, text in lineage("wheel") if instruction == "ENV")
    assert "PIP_CONSTRAINT=/build/constraints.txt" in environment
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [*extras["mooncake"], *extras["otel"], *extras["gpu"], "cyclonedx-bom", "torch"]
    assert {re.split(r"[^\w.-]", one)[0] for one in named} <= set(pinned)


def test_what_is_sent_to_a_builder_is_what_the_wheel_is_made_of() -> None:
    """Everything is left out but for a list: keys, environments and caches lie in none of its folders."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    assert sent == {
        *("cluster", "kernels", "kvstore", "src", "workers"),
        *("LICENSE", "README.md", "constraints.txt", "pyproject.toml", "setup.py"),
    }


def test_the_version_is_that_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert any(instruction == "ARG" and f"VERSION={version}" in text for instruction, text in steps())
    for file in ("deploy/docker/Dockerfile", "deploy/compose.yaml", "docs/install.md"):
        assert set(re.findall(r"\btidemill:(\d[\d.]*\d)", (ROOT / file).read_text())) == {version}
