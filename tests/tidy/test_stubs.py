"""The committed protobuf stubs are what the compiler makes of tidemill.proto."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTO = "tidemill/cluster/proto/tidemill.proto"


def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "src"]
    subprocess.run(
        [*command, f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", PROTO], cwd=ROOT, check=True
    )
    made = sorted((tmp_path / "tidemill/cluster/proto").iterdir())
    assert [file.name for file in made] == ["tidemill_pb2.py", "tidemill_pb2.pyi"]
    for file in made:
        assert (ROOT / "cluster/proto" / file.name).read_text() == file.read_text(), "run `make stubs`"
