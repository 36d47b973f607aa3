"""A release is made from its tag; charts reach a registry as Helm's artefacts."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import helm_python
import pytest
import yaml
from tools.release import CHARTS, NotReleasable, build_charts, push, tagged_version

from tests.support.deploy.oci_registry import oci_registry

ROOT = Path(__file__).parents[3]
HELM_CONFIG = "application/vnd.cncf.helm.config.v1+json"
HELM_LAYER = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    command = ["git", *who, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository whose newest version is 0.2.0, without its tag."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0\n\n## 0.1.0\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "Begin")
    return tmp_path


def test_version_is_the_tag_at_head(tree: Path) -> None:
    git(tree, "tag", "v0.2.0")
    assert tagged_version(tree) == "0.2.0"


def test_release_needs_the_tag_of_the_changelog(tree: Path) -> None:
    with pytest.raises(NotReleasable, match=r"no tag, and CHANGELOG.md begins with 0.2.0: git tag v0.2.0"):
        tagged_version(tree)
    git(tree, "tag", "v0.3.0")
    with pytest.raises(NotReleasable, match=r"v0.3.0, and CHANGELOG.md begins with 0.2.0"):
        tagged_version(tree)


def test_release_needs_every_change_committed(tree: Path) -> None:
    git(tree, "tag", "v0.2.0")
    (tree / "new").write_text("")
    with pytest.raises(NotReleasable, match="not committed"):
        tagged_version(tree)


def version_by_setup(folder: Path) -> str:
    """Return the version that setup.py gives in a folder."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "setup.py"), "--version"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()[-1]


def test_setup_gives_the_version_of_the_newest_tag(tree: Path) -> None:
    assert version_by_setup(tree) == "0.2.0"  # without a tag: the last release
    git(tree, "tag", "v0.3.0")
    assert version_by_setup(tree) == "0.3.0"
    git(tree, "commit", "--quiet", "--allow-empty", "-m", "Go on")
    commit = git(tree, "rev-parse", "--short", "HEAD").strip()
    assert version_by_setup(tree) == f"0.3.0+1.g{commit}"


def test_source_distribution_keeps_its_version(tree: Path) -> None:
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: tidemill\nVersion: 0.1.9\n\nText\n")
    assert version_by_setup(tree) == "0.1.9"


def test_charts_reach_a_registry_and_come_back(tmp_path: Path) -> None:
    packages = build_charts(tmp_path, "0.9.0")
    with oci_registry() as registry:
        pushed = push(registry.address, tmp_path, plain_http=True)
        assert pushed == [f"{registry.address}/charts/{name}-0.9.0" for name in CHARTS]
        for name, package in zip(CHARTS, packages, strict=True):
            manifest = json.loads(registry.contents[registry.tags[f"charts/{name}:0.9.0"]][1])
            assert manifest["config"]["mediaType"] == HELM_CONFIG
            assert [layer["mediaType"] for layer in manifest["layers"]] == [HELM_LAYER]
            assert registry.contents[manifest["layers"][0]["digest"]][1] == package.read_bytes()
            folder = tmp_path / "pulled"
            folder.mkdir(exist_ok=True)
            reference = f"oci://{registry.address}/charts/{name}"
            helm_python.pull(reference, version="0.9.0", destination=folder, plain_http=True)
            with tarfile.open(folder / package.name) as archive:
                chart = archive.extractfile(f"{name}/Chart.yaml")
                assert chart is not None
                written = yaml.safe_load(chart)
            assert (written["version"], written["appVersion"]) == ("0.9.0", "0.9.0")
