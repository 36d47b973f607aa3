# pyright: basic
# transformers' classes have no usable types.
"""Qwen3-Next against transformers: logits, greedy tokens; and equal bits along every path."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.hybrid import CONFIGS, Runner, random_model, save
from tidemill.kernels.dispatch import REFERENCE, Operators
from tidemill.workers.models.bundled import bundled
from tidemill.workers.models.registry import LoadedModel, load

LENGTH = 150
CUTS = {
    "one prefill": [150],
    "chunks, then decode": [64, 64, 13, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "odd chunks": [1, 62, 1, 2, 63, 21],
    "decode from the start": [1] * 150,
}
NOTEBOOK = (
    "Alice keeps the key in the harbor. Bob is now at the mill. The code of Carol is 4071. "
    "The flag is now green. Bob is now at the cave. Henry keeps the ladder in the barn. "
)
PROMPTS = (
    NOTEBOOK + "Where is Bob now?",
    NOTEBOOK + NOTEBOOK + "What is the code of Carol?",
    "Hello!",
)


def no_progress(_done: int, _total: int) -> None:
    pass


def tokens_of(seed: int, count: int = LENGTH) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=[*CONFIGS, "moe-two-values in bfloat16"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cpu: Operators
) -> tuple[transformers.PreTrainedModel, LoadedModel]:
    """Theirs computes in float32, also with weights that a checkpoint holds in bfloat16; so does ours."""
    name, _, dtype = request.param.partition(" in ")
    theirs = random_model(name).to(getattr(torch, dtype or "float32"))
    folder = save(theirs, tmp_path_factory.mktemp("model"))
    return theirs.float(), load(folder, cpu, no_progress)


def test_logits_equal_those_of_transformers(pair: tuple[transformers.PreTrainedModel, LoadedModel]) -> None:
    theirs, ours = pair
    tokens = tokens_of(1)
    with torch.no_grad():
        wanted = theirs(torch.tensor([tokens])).logits[0]
    assert float(wanted.std()) > 1, "weights too small to tell right from wrong"
    runner = Runner(ours, page_tokens=16)
    for name in ("one prefill", "chunks, then decode"):
        found = runner.run(tokens, CUTS[name])
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-4, name


def test_the_reference_operators_give_the_same_logits(
    pair: tuple[transformers.PreTrainedModel, LoadedModel], tmp_path: Path
) -> None:
    theirs, ours = pair
    plain = load(save(theirs, tmp_path), REFERENCE, no_progress)
    tokens = tokens_of(2, 40)
    wanted, found = (Runner(m, 16).run(tokens, [33, 1, 6]) for m in (plain, ours))
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-4


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_every_way_to_cut_a_sequence_gives_the_same_bits(
    pair: tuple[transformers.PreTrainedModel, LoadedModel], page_tokens: int
) -> None:
    runner, tokens = Runner(pair[1], page_tokens), tokens_of(3)
    wanted, *others = (runner.run(tokens, cut) for cut in CUTS.values())
    for found, name in zip(others, list(CUTS)[1:], strict=True):
        assert torch.equal(found, wanted), name


def test_every_batch_and_number_of_threads_gives_the_same_bits(
    pair: tuple[transformers.PreTrainedModel, LoadedModel],
) -> None:
    runner = Runner(pair[1], page_tokens=16)
    prompts = [tokens_of(seed, count) for seed, count in ((1, 90), (2, 33), (3, 5), (4, 64))]
    torch.set_num_threads(2)
    wanted = [runner.run(prompt, [len(prompt)]) for prompt in prompts]
    torch.set_num_threads(1)
    sequences = [runner.add(prompt) for prompt in prompts]
    while any(s.computed < len(s.tokens) for s in sequences):
        # Odd rows decode while even rows prefill, and the order changes with every step.
        live = [(i, s) for i, s in enumerate(sequences) if s.computed < len(s.tokens)]
        runner.step([(s, min(1 if i % 2 else 17, len(s.tokens) - s.computed)) for i, s in live])
        sequences.reverse()
    for s in sequences:
        found = pair[1].model.logits(torch.cat(s.hidden))
        assert torch.equal(found, wanted[prompts.index(s.tokens)])


def test_bfloat16_weights_and_pages_stay_close(tmp_path: Path, cpu: Operators) -> None:
    theirs = random_model("moe-two-values").bfloat16()
    ours = load(save(theirs, tmp_path), cpu, no_progress)
    tokens = tokens_of(5)
    found = Runner(ours, 16, "bfloat16").run(tokens, CUTS["chunks, then decode"])
    with torch.no_grad():
        wanted = theirs.float()(torch.tensor([tokens])).logits[0]
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert float(divergence) < 1e-3


def test_keeper_says_what_it_says_in_transformers(cpu: Operators) -> None:
    folder = bundled()["keeper"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    runner = Runner(load(folder, cpu, no_progress), page_tokens=64)
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        wanted = theirs.generate(
            torch.tensor([ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert runner.greedy(ids, 16) == wanted[0, len(ids) :].tolist(), prompt
