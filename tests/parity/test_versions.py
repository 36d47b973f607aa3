"""Two versions on one store, as in an upgrade: each has pages of its own, and answers of its own."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file, save_file

from tidemill import LLM, SamplingParams
from tidemill.kvstore import layout
from tidemill.kvstore.stores import seal
from tidemill.workers.sources.names import bundled

KEEPER = bundled()["keeper"]
DRAWS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
Answers = list[tuple[list[int], bool]]
"""The tokens of each prompt, and whether any of its pages came from a store or a cache."""


@pytest.fixture
def revision(tmp_path: Path) -> Path:
    """The same model, trained a little longer."""
    folder = tmp_path / "revision"
    shutil.copytree(KEEPER, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if "embed" in name)
    weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompts() -> list[list[int]]:
    rng = Random(3)
    return [[rng.randrange(5, 890) for _ in range(150 + 40 * index)] for index in range(3)]


def answers(llm: LLM) -> Answers:
    found = llm.generate(prompts(), DRAWS, progress=False)
    return [([*result.outputs[0].token_ids], result.num_cached_tokens > 0) for result in found]


def opened(model: Path, store: str) -> LLM:
    return LLM(model, memory="32MiB", store=store)


def fresh(model: Path) -> list[list[int]]:
    """Return the answers with an empty store."""
    with opened(model, "memory:") as llm:
        return [tokens for tokens, _ in answers(llm)]


def test_two_revisions_of_a_model_share_a_store_and_no_page(tmp_path: Path, revision: Path) -> None:
    expected = [fresh(KEEPER), fresh(revision)]
    assert expected[0] != expected[1]
    store = f"file://{tmp_path}/store"
    with ExitStack() as versions:
        both = [versions.enter_context(opened(model, store)) for model in (KEEPER, revision)]
        for llm, tokens in zip(both, expected, strict=True):
            assert answers(llm) == [(token, False) for token in tokens]
    for model, tokens in ((revision, expected[1]), (KEEPER, expected[0])):
        with opened(model, store) as llm:
            assert answers(llm) == [(token, True) for token in tokens], "each finds its own"


def test_two_versions_of_the_layout_share_a_store_and_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"file://{tmp_path}/store"
    expected = fresh(KEEPER)
    with opened(KEEPER, store) as llm:
        assert answers(llm) == [(answer, False) for answer in expected]
    with monkeypatch.context() as later:
        for module in (layout, seal):
            later.setattr(module, "LAYOUT_VERSION", layout.LAYOUT_VERSION + 1)
        with opened(KEEPER, store) as llm:
            assert answers(llm) == [(answer, False) for answer in expected]
        with opened(KEEPER, store) as llm:
            assert answers(llm) == [(answer, True) for answer in expected]
    with opened(KEEPER, store) as llm:
        assert answers(llm) == [(answer, True) for answer in expected], "the older one's are still there"
