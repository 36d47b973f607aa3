"""The options of `tidemill plan`."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import TypeAdapter, ValidationError

from tidemill.cluster.bench.workloads import RandomShape
from tidemill.cluster.cli.options.arguments import Option, UsageError, bytes_of, check_above_zero, named
from tidemill.cluster.plan.cards import CARDS, HERE
from tidemill.kernels.shared.quantization import Quantization
from tidemill.workers.options import Duration

if TYPE_CHECKING:
    from tidemill.cluster.config.tree import RootConfig
    from tidemill.cluster.plan.command import Serve

PERCENTILES = (50, 90, 99)

OPTIONS: tuple[Option, ...] = (
    (
        "--trace",
        {"type": Path, "metavar": "FILE"},
        "requests in the Mooncake format, one object per line",
    ),
    (
        "--request-rate",
        {"type": float, "metavar": "R"},
        "requests per second; of a trace instead of its own",
    ),
    ("--input-len", {"type": int, "default": 1024, "metavar": "N"}, "tokens of a prompt, without --trace"),
    ("--output-len", {"type": int, "default": 128, "metavar": "N"}, "tokens of an answer, without --trace"),
    (
        "--range-ratio",
        {"type": float, "default": 0.0, "metavar": "X"},
        "lengths vary by this part of them, up and down",
    ),
    ("--num-prompts", {"type": int, "default": 200, "metavar": "N"}, "requests that are simulated, at most"),
    ("--seed", {"type": int, "default": 0, "metavar": "N"}, "seed of arrivals and lengths"),
    ("--ttft-target", {"metavar": "TIME"}, "longest time to the first token, for example 500ms (any)"),
    ("--itl-target", {"metavar": "TIME"}, "longest time between two tokens, for example 50ms (any)"),
    (
        "--percentile",
        {"type": int, "default": 90, "choices": PERCENTILES},
        "the targets hold for this share of all",
    ),
    (
        "--card",
        {"nargs": "+", "default": [HERE], "choices": [HERE, *CARDS]},
        "cards to plan for; the first that meets the targets is written (here: this machine)",
    ),
    ("--max-cards", {"type": int, "default": 16, "metavar": "N"}, "most cards of one kind"),
    ("--threads", {"type": int, "default": 1, "metavar": "N"}, "threads of each worker, with --card here"),
    ("--memory", {"default": "1GiB", "metavar": "SIZE"}, "memory of each worker, with --card here"),
    (
        "--calibration",
        {"type": Path, "metavar": "FILE"},
        "step times of this machine as JSON: read if the file exists, otherwise measured and written",
    ),
    (
        "--load-format",
        {"default": "auto", "choices": ["auto", "dummy"]},
        "dummy: config.json without weights",
    ),
    (
        "--quantization",
        {"choices": get_args(Quantization)},
        "of the weights while they are read, as in `tidemill serve`",
    ),
    (
        "--output",
        {"type": Path, "default": Path("cluster.yaml"), "metavar": "FILE"},
        "configuration file",
    ),
    ("--json", {"dest": "as_json", "action": "store_true"}, "print JSON"),
)


def add_plan_options(
    plan: argparse.ArgumentParser,
    count_cores: Callable[[], int],
    serve: "Serve",
    problems_of: "Callable[[RootConfig], Sequence[str]]",
) -> None:
    """Add the options and set `run`, which imports the simulator when it is called."""
    model_help = "a Hugging Face folder, a downloaded repository, or one of `tidemill models`"
    plan.add_argument("model", metavar="MODEL", help=model_help)
    for option, shape, text in OPTIONS:
        shown = " (%(default)s)" if "default" in shape and "nargs" not in shape else ""
        plan.add_argument(option, **shape, help=text + shown)

    def run(options: argparse.Namespace) -> int:
        from tidemill.cluster.plan.command import plan as plan_cluster  # noqa: PLC0415 - imports torch

        return plan_cluster(_checked(options), count_cores(), serve, problems_of)

    plan.set_defaults(run=run)


def _checked(options: argparse.Namespace) -> Any:  # noqa: ANN401  PlanOptions, whose import waits for torch
    """Return the checked options. Raises UsageError."""
    from tidemill.cluster.plan.command import PlanOptions  # noqa: PLC0415 - imports torch
    from tidemill.cluster.plan.search import Targets  # noqa: PLC0415
    from tidemill.cluster.plan.workload import Load  # noqa: PLC0415

    counts = ("input_len", "output_len", "num_prompts", "max_cards", "threads", "request_rate")
    check_above_zero(options, *counts)
    if not 0 <= options.range_ratio < 1:
        raise UsageError(f"--range-ratio is {options.range_ratio:g}: set it to 0 or more, below 1")
    if options.trace is None and options.request_rate is None:
        raise UsageError("there is no load: give --trace, or --request-rate with lengths")
    bytes_of(options.memory, "--memory")
    shape = RandomShape(**named(options, RandomShape))
    return PlanOptions(
        **named(options, PlanOptions),
        load=Load(trace=options.trace, request_rate=options.request_rate, shape=shape, seed=options.seed),
        targets=Targets(
            ttft_s=_seconds(options.ttft_target, "--ttft-target"),
            itl_s=_seconds(options.itl_target, "--itl-target"),
            percentile=options.percentile,
        ),
        cards=tuple(dict.fromkeys(options.card)),
        cards_max=options.max_cards,
    )


def _seconds(text: str | None, option: str) -> float | None:
    if text is None:
        return None
    try:
        seconds: float = TypeAdapter(Duration).validate_python(text)
    except ValidationError as error:
        raise UsageError(f"{option} is {text!r}: write it like 500ms or 0.5s") from error
    if not seconds:
        raise UsageError(f"{option} is {text}: set it above 0")
    return seconds
