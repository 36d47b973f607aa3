"""The options of `tidemill simulate`."""

import argparse
from dataclasses import replace
from pathlib import Path

from tidemill.cluster.cli.options.arguments import Option, UsageError, bytes_of, check_above_zero

POLICIES = (
    "ours, random, round-robin, least-load, prefix-affinity, min-ttft, formula, "
    "and under the names of their owners dynamo, sglang, aibrix, llm-d, conductor"
)

OPTIONS: tuple[Option, ...] = (
    ("--agents", {"type": int, "default": 16, "metavar": "N"}, "number of agents of the trace `agents`"),
    ("--prefill", {"type": int, "default": 8, "metavar": "N"}, "number of prefill workers"),
    ("--decode", {"type": int, "default": 8, "metavar": "N"}, "number of decode workers"),
    ("--mixed", {"type": int, "metavar": "N"}, "N workers that do both, instead of these"),
    (
        "--eviction",
        {"default": "value", "choices": ["value", "lru"]},
        "eviction order in each worker; with --engine real only",
    ),
    (
        "--hints",
        {"default": "all", "choices": ["all", "breakpoints", "none"]},
        "hints of the trace that are used, with --engine real only; `breakpoints` are what edges find",
    ),
    ("--routers", {"type": int, "default": 1, "metavar": "N"}, "number of routers, with --policy ours"),
    ("--edges", {"type": int, "default": 1, "metavar": "N"}, "number of edges, each with one of the routers"),
    (
        "--spread",
        {"default": "edge", "choices": ["edge", "family"]},
        "what chooses the router of a request: its edge, or its prefix family",
    ),
    (
        "--heartbeat",
        {"type": float, "default": 0.25, "metavar": "SECONDS"},
        "longest time until routers know of a change; 0: they are omniscient",
    ),
    (
        "--share",
        {"type": float, "metavar": "SECONDS"},
        "time until the other routers know of a placement; without it they do not",
    ),
    ("--copies", {"type": int, "default": 1, "metavar": "N"}, "copies of the trace, without common prefixes"),
    ("--policy", {"default": "ours", "metavar": "NAME"}, f"placement policy: {POLICIES}"),
    ("--speed-up", {"type": float, "default": 1.0, "metavar": "X"}, "factor on the arrival rate"),
    ("--requests", {"type": int, "metavar": "N"}, "replay only the first N requests"),
    (
        "--cache",
        {"default": "attention", "choices": ["attention", "hybrid"]},
        "state needed to resume a prefix: its pages, or its pages and a checkpoint",
    ),
    (
        "--engine",
        {"default": "real", "choices": ["real", "model"]},
        "real engines, or workers as formulas, which are rough and several times as fast",
    ),
    (
        "--memory",
        {"type": int, "default": 2048, "metavar": "BLOCKS"},
        "memory of a worker in blocks of 512 tokens",
    ),
    ("--store", {"default": "1TiB", "metavar": "SIZE"}, "size of the store of all workers"),
    (
        "--store-rate",
        {"default": "10GB", "metavar": "SIZE"},
        "bytes per second between a worker and the store; 0 with --engine model: no store",
    ),
    (
        "--speed",
        {"type": Path, "metavar": "FILE"},
        "speed of a worker as JSON: `speed` of a worker in `tidemill status --json`",
    ),
    (
        "--ttft-max",
        {"type": float, "metavar": "SECONDS"},
        "refuse requests whose predicted time to first token is longer",
    ),
    ("--grain", {"type": int, "default": 8, "metavar": "TOKENS"}, "tokens that are simulated as one"),
    ("--seed", {"type": int, "default": 1, "metavar": "N"}, "seed of the jitter of arrivals"),
    ("--json", {"action": "store_true"}, "print JSON"),
    ("--plot", {"type": Path, "metavar": "FILE"}, "write a picture; needs tidemill[plot]"),
)


def add_simulate_options(simulate: argparse.ArgumentParser) -> None:
    """Add the options and set `run`, which imports the simulator when it is called."""
    trace_help = "requests in the Mooncake format, one JSON object per line; or `agents`, generated"
    simulate.add_argument("trace", type=Path, metavar="TRACE", help=trace_help)
    for option, shape, text in OPTIONS:
        simulate.add_argument(option, **shape, help=text + (" (%(default)s)" if "default" in shape else ""))
    simulate.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate a trace. Raises UsageError, TraceError, UnknownPolicy, NoPictures."""
    # These import torch.
    from tidemill.cluster.simulate.command import SimulatedTrace, read_speed, simulate_trace  # noqa: PLC0415
    from tidemill.cluster.simulate.cost import StepCost  # noqa: PLC0415
    from tidemill.cluster.simulate.setup import NEVER_S, Setup  # noqa: PLC0415

    check_above_zero(options, "speed_up")
    trace = SimulatedTrace(
        path=options.trace,
        agents=_at_least(options.agents, 1, "--agents"),
        copies=_at_least(options.copies, 1, "--copies"),
        speed_up=options.speed_up,
        requests=options.requests,
    )
    setup = Setup(
        prefill=0 if options.mixed else _at_least(options.prefill, 1, "--prefill"),
        decode=0 if options.mixed else _at_least(options.decode, 1, "--decode"),
        mixed=0 if options.mixed is None else _at_least(options.mixed, 1, "--mixed"),
        eviction=options.eviction,
        hints=options.hints,
        policy=options.policy,
        routers=_at_least(options.routers, 1, "--routers"),
        edges=_at_least(options.edges, 1, "--edges"),
        spread=options.spread,
        heartbeat_s=options.heartbeat,
        share_s=options.share,
        hybrid=options.cache == "hybrid",
        engine=options.engine,
        blocks=_at_least(options.memory, 16, "--memory"),
        store_bytes=bytes_of(options.store, "--store"),
        cost=StepCost(speed=replace(read_speed(options.speed), fetch_bytes_per_s=_rate(options))),
        ttft_s_max=NEVER_S if options.ttft_max is None else options.ttft_max,
        grain=_grain(options.grain),
        seed=options.seed,
    )
    return simulate_trace(trace, setup, as_json=options.json, picture=options.plot)


def _at_least(value: int, least: int, name: str) -> int:
    if value < least:
        raise UsageError(f"{name} is {value}: set it to {least} or more")
    return value


def _rate(options: argparse.Namespace) -> float:
    rate = bytes_of(options.store_rate, "--store-rate")
    if not rate and options.engine == "real":
        raise UsageError("--store-rate 0: real engines hand prompts over through the store, set it above 0")
    return float(rate)


def _grain(grain: int) -> int:
    if grain not in {1, 2, 4, 8, 16}:
        raise UsageError(f"--grain is {grain}: set it to 1, 2, 4, 8 or 16")
    return grain
