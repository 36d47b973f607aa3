"""Bugs to plant in the model runner, sampler and drafters."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "padding keeps the previous content of its row",
        "workers/execution/cuda_graphs.py::pad",
        "whole[len(part) :] = empty",
        "pass",
        "tests/unit/workers/execution/test_cuda_graphs.py",
    ),
    Planted(
        "a row draws from its neighbour's first token",
        "workers/execution/model_runner.py::logits_of",
        "$PLACES += range($END - $ROW.$DRAFTS - 1, $END)",
        "$PLACES += range($END - $ROW.$DRAFTS, $END + 1)",
        "tests/unit/workers/execution/test_model_runner.py",
    ),
    Planted(
        "a row continues from the first of its drawn tokens",
        "workers/execution/model_runner.py::TorchRunner.run_now",
        "$TOKENS[-1] if",
        "$TOKENS[0] if",
        "tests/unit/workers/execution/test_model_runner.py",
    ),
    Planted(
        "a draft is written to a page that the row does not own",
        "workers/execution/mtp_drafter.py::MtpDrafter._guess",
        "and $ROW.$END < len($ROW.$PAGES) * self.$PAGE_TOKENS",
        "",
        "tests/unit/workers/execution/test_mtp_drafter.py",
    ),
    Planted(
        "a grammar allows tokens beyond the vocabulary of the model",
        "workers/execution/grammar.py::Matcher.__init__",
        "mask_of(range($VOCAB_SIZE % 64), 64)",
        "-1",
        "tests/unit/workers/execution/test_grammar.py",
    ),
    Planted(
        "every position draws with the same random number",
        "workers/execution/sampler.py::uniform_of",
        '$POSITION.$TO_BYTES(8, "little")',
        'b""',
        "tests/unit/workers/execution/test_sampler.py",
    ),
    Planted(
        "top-p drops the token that crosses the threshold",
        "kernels/draw/reference.py::_draw",
        "$SUMS_V - $WEIGHTS_V < ceil(",
        "$SUMS_V < ceil(",
        "tests/unit/kernels/test_draw.py",
    ),
    Planted(
        "a guess that was right counts twice in penalties",
        "workers/execution/sampler.py::Tables._adjust",
        "$DRAW.before[$PUSHED:]",
        "$DRAW.before",
        "tests/unit/workers/execution/test_grammar.py",
    ),
    Planted(
        "the window page table equals the page table",
        "workers/execution/step_tensors.py::inputs_of",
        "]), $WINDOWS_BN=$TABLES([$ROW.$WINDOWS[: -(-$ROW.$END /",
        "]),\n        $WINDOWS_BN=$TABLES([$ROW.pages[: -(-$ROW.$END /",
        "tests/unit/workers/execution/test_model_runner.py",
    ),
)
