"""The options of `tidemill simulate`."""

import argparse
from pathlib import Path

from tidemill.cluster.cli.arguments import UsageError, bytes_of


def add_simulate_options(simulate: argparse.ArgumentParser) -> None:
    """Sets `run` too, which imports what it needs when it is called."""
    add = simulate.add_argument
    add("trace", type=Path, metavar="TRACE", help="requests in the Mooncake format, one JSON object per line")
    add("--prefill", type=int, default=8, metavar="N", help="workers that compute prompts (%(default)s)")
    add("--decode", type=int, default=8, metavar="N", help="workers that generate (%(default)s)")
    add(
        "--policy",
        default="ours",
        metavar="NAME",
        help="who places: ours, random, round-robin, least-load, prefix-affinity, min-ttft, formula "
        "(%(default)s)",
    )
    add("--speed-up", type=float, default=1.0, metavar="X", help="of the arrivals (%(default)s)")
    add("--requests", type=int, metavar="N", help="the first ones alone")
    add(
        "--cache",
        default="attention",
        choices=["attention", "hybrid"],
        help="what a prefix can be resumed from: its pages, or its pages and a checkpoint (%(default)s)",
    )
    add(
        "--engine",
        default="real",
        choices=["real", "model"],
        help="whole engines, or workers that are formulas: rough, and several times as fast (%(default)s)",
    )
    add("--memory", type=int, default=2048, metavar="BLOCKS", help="of a worker, of 512 tokens (%(default)s)")
    add("--store", default="1TiB", metavar="SIZE", help="of all workers together (%(default)s)")
    add(
        "--store-rate",
        default="10GB",
        metavar="SIZE",
        help="that a worker moves in a second (%(default)s); 0 is no store, with --engine model",
    )
    add(
        "--speed", type=Path, metavar="FILE", help="a worker's speed as JSON: `speed` of a worker in `status`"
    )
    add("--ttft-max", type=float, metavar="SECONDS", help="refuse what is predicted to take longer")
    add("--grain", type=int, default=8, metavar="TOKENS", help="that are simulated as one (%(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="of the jitter of arrivals (%(default)s)")
    add("--json", action="store_true", help="as JSON")
    add("--plot", type=Path, metavar="FILE", help="write a picture: needs tidemill[plot]")
    simulate.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Raises UsageError, TraceError, UnknownPolicy, NoPictures."""
    from tidemill.cluster.simulate.command import SimulateOptions, simulate_trace  # noqa: PLC0415 - torch, when it runs

    return simulate_trace(
        SimulateOptions(
            trace=options.trace,
            prefill=_at_least(options.prefill, 1, "--prefill"),
            decode=_at_least(options.decode, 1, "--decode"),
            policy=options.policy,
            speed_up=_positive(options.speed_up, "--speed-up"),
            requests=options.requests,
            hybrid=options.cache == "hybrid",
            engine=options.engine,
            blocks=_at_least(options.memory, 16, "--memory"),
            store_bytes=bytes_of(options.store, "--store"),
            store_bytes_per_s=_rate(options),
            speed_file=options.speed,
            ttft_s_max=options.ttft_max,
            grain=_grain(options.grain),
            seed=options.seed,
            as_json=options.json,
            plot=options.plot,
        )
    )


def _at_least(value: int, least: int, name: str) -> int:
    if value < least:
        raise UsageError(f"{name} is {value}: set it to {least} or more")
    return value


def _positive(value: float, name: str) -> float:
    if value <= 0:
        raise UsageError(f"{name} is {value:g}: set it above 0")
    return value


def _rate(options: argparse.Namespace) -> float:
    rate = bytes_of(options.store_rate, "--store-rate")
    if not rate and options.engine == "real":
        raise UsageError("--store-rate 0: real engines hand prompts over through the store, give it a rate")
    return float(rate)


def _grain(grain: int) -> int:
    if grain not in {1, 2, 4, 8, 16}:
        raise UsageError(f"--grain is {grain}: set it to 1, 2, 4, 8 or 16")
    return grain
