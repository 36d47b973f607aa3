"""Every architecture: transformers' logits, equal bits however it is cut, the same answer on every way.

`MODEL_FOLDER=folder pytest tests/parity/test_architectures.py -k given` proves a small model of your own.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.parity.architectures import MODELS, VOCABULARY, names, random_model, save
from tests.support.parity.proof import CHECKS, PAGES, Subject
from tests.support.parity.steps import Runner
from tests.support.parity.ways import check_every_way, journey_of
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.workers.models.architectures.registry import ARCHITECTURES, load
from tidemill.workers.sources.names import bundled

GIVEN = {"given": Path(folder)} if (folder := os.environ.get("MODEL_FOLDER")) else {}
FOLDERS = {"keeper": bundled()["keeper"], **GIVEN}
FIRST = {f"{architecture}/{next(iter(shapes))}" for architecture, shapes in MODELS.items()}
NOTEBOOK = (
    "Alice keeps the key in the harbor. Bob is now at the mill. The code of Carol is 4071. "
    "The flag is now green. Bob is now at the cave. Henry keeps the ladder in the barn. "
)
PROMPTS = (
    NOTEBOOK + "Where is Bob now?",
    NOTEBOOK + NOTEBOOK + "What is the code of Carol?",
    "Hello!",
)


def _quick_shape(name: str) -> object:
    """The first shape of each architecture is quick to prove; the others wait for `make test-all`."""
    return pytest.param(name, marks=[] if name in FIRST | GIVEN.keys() else pytest.mark.slow)


def _quick_way(name: str) -> object:
    quick = name.startswith(
        ("qwen3_next", "gpt_oss/alternating", "deepseek", "granitemoehybrid", "llama", *FOLDERS)
    )
    return pytest.param(name, marks=[] if quick else pytest.mark.slow)


def _saved(name: str, to: Path) -> Path:
    return FOLDERS[name] if name in FOLDERS else save(random_model(name), to)


@pytest.fixture(scope="module", params=[_quick_shape(name) for name in (*names(), *GIVEN)])
def subject(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    cpu: Operators,
    half_cpu: Operators,
) -> Subject:
    scratch = tmp_path_factory.mktemp("model")
    folder = _saved(request.param, scratch / "model")
    return Subject(folder, cpu, half_cpu, scratch, PAGES if request.param in FIRST else PAGES[1:2])


def test_all_that_is_supported_is_here() -> None:
    classes = {shape.model for shapes in MODELS.values() for shape in shapes.values()}
    assert classes == set(ARCHITECTURES)


@pytest.mark.parametrize("check", CHECKS)
def test_architecture_passes(subject: Subject, check: str) -> None:
    CHECKS[check](subject)


@pytest.mark.parametrize(
    "name",
    [_quick_way(name) for name in (*sorted(FIRST | {"gpt_oss/page-wide", "gpt_oss/narrow"}), *FOLDERS)],
)
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_every_way_gives_the_same_answer(
    name: str, compute_dtype: ComputeDtype, kernel_cache: Path, tmp_path: Path
) -> None:
    folder = _saved(name, tmp_path / "model")
    check_every_way(journey_of(folder, kernel_cache, tmp_path, VOCABULARY, compute_dtype))


def test_keeper_answers_as_in_transformers(cpu: Operators) -> None:
    folder = bundled()["keeper"]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    runner = Runner(load(folder, cpu, lambda _done, _total: None), page_tokens=64)
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        wanted = theirs.generate(
            torch.tensor([ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert runner.greedy(ids, 16) == wanted[0, len(ids) :].tolist(), prompt
