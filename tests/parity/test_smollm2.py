"""A trained model as people have it, a GGUF file of 4 bits: transformers' answers and perplexity."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from tests.support.parity.steps import Runner
from tests.support.workers.smollm2 import smollm2_file, smollm2_model
from tests.tidy.tree import ROOT
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.kernels.dispatch import Operators
from tidemill.workers.models.architectures.registry import LoadedModel, compute_dtype_of, load, no_progress
from tidemill.workers.sources.download import download
from tidemill.workers.sources.names import source_of

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fib(n):",
    "The sun rises in the",
    "Water boils at",
    "A list of three fruits:",
    "In 1969,",
    "Hello, my name is",
)
NEW_TOKENS = 24
TEXT_TOKENS = 512


class Model(NamedTuple):
    ours: LoadedModel
    theirs: LlamaForCausalLM
    tokenizer: FolderTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = source_of(str(smollm2_file()), None, tmp_path_factory.mktemp("gguf"))
    assert source is not None
    return download(source)


@pytest.fixture(scope="module")
def model(folder: Path, cpu: Operators) -> Model:
    ours = load(folder, cpu, no_progress, compute_dtype="float32")
    return Model(ours, smollm2_model(), load_tokenizer(folder))


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    return float(functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).exp())


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_answer_is_that_of_transformers(model: Model, prompt: str) -> None:
    tokens = model.tokenizer.encode(prompt)
    found = Runner(model.ours, 16).greedy(tokens, NEW_TOKENS)
    with torch.no_grad():
        after = model.theirs(torch.tensor([tokens + found])).logits[0, len(tokens) - 1 : -1]
    assert after.argmax(-1).tolist() == found


def test_perplexity_is_that_of_transformers(model: Model) -> None:
    tokens = model.tokenizer.encode((ROOT / "ARCHITECTURE.md").read_text())[:TEXT_TOKENS]
    with torch.no_grad():
        wanted = perplexity(model.theirs(torch.tensor([tokens])).logits[0], tokens)
    assert 2 < wanted < 200  # it knows English
    found = perplexity(Runner(model.ours, 16).run(tokens, [TEXT_TOKENS]), tokens)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_products_are_in_bfloat16_unless_they_are_set(folder: Path) -> None:
    assert compute_dtype_of(folder) == "bfloat16"
