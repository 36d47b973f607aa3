"""Real engines of others, for `make engines`: nothing is skipped, an environment that is missing fails."""

import os
import subprocess
from pathlib import Path

import pytest
from benchmarks.peers.models import make_model


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    python = Path(os.environ["VLLM"])
    assert python.exists(), f"{python} is missing: VLLM of `make engines` is a python with vLLM"
    return python


@pytest.fixture(scope="session")
def nixl_python(vllm_python: Path) -> Path:
    found = subprocess.run([vllm_python, "-c", "import nixl"], capture_output=True, text=True, check=False)
    fix = f"{vllm_python} -m pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1"
    assert not found.returncode, f"VLLM has no NIXL ({found.stderr[-200:]}): {fix}"
    return vllm_python


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which `make_model` makes models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def model(models: Path) -> Path:
    return make_model(models, "dense")
