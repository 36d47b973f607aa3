"""The protobuf stubs, which are made when the package is installed, are still what the .proto files say."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT

FOLDER = Path("tidemill/cluster/rpc/proto")
PROTOS = sorted(FOLDER / path.name for path in (ROOT / "cluster/rpc/proto").glob("*.proto"))


def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "src"]
    subprocess.run(
        [*command, f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", *map(str, PROTOS)],
        cwd=ROOT,
        check=True,
    )
    made = sorted((tmp_path / FOLDER).iterdir())
    assert len(made) == 2 * len(PROTOS) == 2
    for file in made:
        assert (ROOT / "cluster/rpc/proto" / file.name).read_text() == file.read_text(), "run `make stubs`"


def test_stubs_are_not_in_git() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "cluster/rpc/proto"],  # noqa: S607 - whichever git there is
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert "_pb2" not in tracked, "git rm --cached what the build makes"
