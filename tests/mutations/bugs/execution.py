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
        "padding has tokens but no row",
        "workers/execution/cuda_graphs.py::choose",
        "0 < shape.rows - rows",
        "0 <= shape.rows - rows",
        "tests/unit/workers/execution/test_cuda_graphs.py",
    ),
    Planted(
        "a device compiles kernels for drafts while serving",
        "workers/execution/cuda_graphs.py::shapes",
        "for $STATES in (1, 2)]",
        "for $STATES in (1,)]",
        "tests/unit/workers/execution/test_launches.py",
    ),
    Planted(
        "prompt logprobs start at the row's first token",
        "workers/execution/logprobs.py::_chunks",
        "$FIRST = $BEGIN + $OFFSET + $START",
        "$FIRST = $BEGIN + $START",
        "tests/unit/workers/engine/test_prompt_logprobs.py",
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
        "the first slot of a page is drafted by neither step",
        "workers/execution/mtp_drafter.py::slots_of",
        "($ROW.$START % $PAGE_TOKENS != 0)",
        "1",
        "tests/unit/workers/execution/test_mtp_drafter.py",
    ),
    Planted(
        "a draft is written to a page that the row does not own",
        "workers/execution/mtp_drafter.py::MtpDrafter._guess",
        "and $ROW.$END < len($ROW.$PAGES) * self.$PAGE_TOKENS",
        "",
        "tests/unit/workers/execution/test_mtp_drafter.py",
    ),
    Planted(
        "a step waits for masks without a limit",
        "workers/execution/grammar.py::Matcher.ready_by",
        "self._mask.exception(max(0.0, $DEADLINE_S - monotonic()))",
        "self._mask.exception(2)",
        "tests/unit/workers/execution/test_grammar_limits.py",
    ),
    Planted(
        "a row with slow masks joins steps before its mask is ready",
        "workers/execution/grammar.py::Matcher.may_launch",
        "if self.is_quick:",
        "if True:",
        "tests/unit/workers/execution/test_grammar_limits.py",
    ),
    Planted(
        "an answer that ended keeps its lexer states",
        "workers/execution/grammar.py::LexerShare.close",
        "$GIVE_BACK()",
        "pass",
        "tests/unit/workers/execution/test_grammar_limits.py",
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
        "workers/execution/sampler.py::_sample_filtered",
        "$CUMULATIVE_NC - $WEIGHTS_NC < $COLUMN",
        "$CUMULATIVE_NC < $COLUMN",
        "tests/unit/workers/execution/test_sampler.py",
    ),
    Planted(
        "the window page table equals the page table",
        "workers/execution/step_tensors.py::inputs_of",
        "]), $WINDOWS_BN=$TABLES([$ROW.$WINDOWS[: -(-$ROW.$END /",
        "]),\n        $WINDOWS_BN=$TABLES([$ROW.pages[: -(-$ROW.$END /",
        "tests/unit/workers/execution/test_model_runner.py",
    ),
)
