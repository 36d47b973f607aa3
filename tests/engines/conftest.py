"""Real engines of others, for `make engines`: nothing is skipped, an environment that is missing fails."""

import os
from pathlib import Path

import pytest
from benchmarks.peers.models import make_model


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    python = Path(os.environ["VLLM"])
    assert python.exists(), f"{python} is missing: VLLM of `make engines` is a python with vLLM"
    return python


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "dense")
