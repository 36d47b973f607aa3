"""The bundled model needs its whole cache: static facts live in the KV, changing ones in the state."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tools.keeper.evaluate import ABLATIONS, accuracy, demo_matches, exact_matches, generate, load
from tools.keeper.questions import questions
from tools.keeper.world import SMALL_TALK
from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = Path(__file__).parents[2] / "workers" / "models" / "keeper"
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module", name="loaded")
def the_bundled_model() -> Iterator[Loaded]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small lose more to threads than they gain
    yield load(FOLDER)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("context_tokens", "count"), [(512, 60), (2000, 48)])
def test_loss_of_each_part_of_the_cache(loaded: Loaded, context_tokens: int, count: int) -> None:
    asked = questions(count, context_tokens, seed=7, per_notebook=12)
    matches = exact_matches(*loaded, asked, ABLATIONS)
    intact, no_kv, no_state = (accuracy(asked, matches[ablation]) for ablation in ABLATIONS)
    assert intact["static"] >= 0.95
    assert intact["changing"] >= 0.90
    assert no_kv["static"] <= 0.2
    assert no_state["changing"] <= 0.2


def test_small_talk_and_the_demo_by_generation(loaded: Loaded) -> None:
    assert [generate(*loaded, user) for user, _ in SMALL_TALK] == [answer for _, answer in SMALL_TALK]
    assert all(demo_matches(*loaded, FOLDER / "demo.json"))
