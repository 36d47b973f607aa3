"""Each Triton operator on a device: its share of the roofline, and its peers where they import.

    python -m benchmarks.gpu.kernels --folder FOLDER [--names REGEX] [--tiny] [--once]

The roofline is measured in the same run: a copy of 4 GiB and a bfloat16 matrix product. An operator is timed
as a CUDA graph, with a cold L2, the median of 20; the rows are those of `gpu_works.py`. What has a goal is
listed once more at the end. `--tiny` goes through all of it on a machine without a device, in Triton's
interpreter: its figures mean nothing, and none is compared with a goal. `--once` calls each operator and
times nothing, for a profiler.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.works import TINY, Call, Shape, Work, normal, works
from tidemill.kernels.dispatch import operators

ROUNDS = 20
ROUNDS_LEAST = 3
ROUNDS_S = 0.5
CALLS = 5  # of one graph
SHORT_CALLS, SHORT_S = 40, 50e-6  # and of one below this time, which is small beside the reads
LEAST_S = 1e-6  # shorter times cannot be distinguished from the reads
HOST_CYCLES = 4_000_000  # about 2 ms
COPY_BYTES = 4 << 30
FLUSH_BYTES = 256 << 20  # several times the L2
MATRIX = 8192


class Stopwatch:
    """A stopwatch of a device, for calls in a graph. A read of unrelated memory precedes each call, so that
    nothing of the call's data is in the L2 and nothing there must be written. The time of the reads is
    subtracted, measured in turn. Data that a call leaves to be written counts."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._other, self._sum = torch.ones(FLUSH_BYTES // 4), torch.empty(1)  # pyrefly: ignore[possibly-uninitialized-attribute]
            self._reads = {calls: self._graph(self._flush, calls) for calls in (CALLS, SHORT_CALLS)}  # pyrefly: ignore[possibly-uninitialized-attribute]

    def seconds(self, call: Call) -> float:
        """Return the time of a call; one that cannot be captured is timed alone, with what lies between its
        launches on the device."""
        call()
        if not self._is_cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        call()
        found_s = self._difference(call, CALLS)
        if found_s is not None and found_s < SHORT_S:
            found_s = self._difference(call, SHORT_CALLS)
        return self._median(call, alone=True) if found_s is None else max(found_s, LEAST_S)

    def _difference(self, call: Call, calls: int) -> float | None:
        """Return the median of differences between a graph with the call and one without it, each right after
        the other, so that a change of clocks meets both. None: the call cannot be captured."""
        reads, both = self._reads[calls], self._graph(lambda: (self._flush(), call()), calls)
        if reads is None or both is None:
            return None
        began_s, found_s = time.monotonic(), list[float]()
        while len(found_s) < ROUNDS_LEAST or (
            len(found_s) < ROUNDS and time.monotonic() - began_s < ROUNDS_S
        ):
            found_s.append(self._once(both) - self._once(reads))
        return median(found_s) / calls

    def _flush(self) -> None:
        torch.sum(self._other, dim=0, keepdim=True, out=self._sum)

    def _graph(self, call: Call, calls: int) -> Call | None:
        """`calls` of them; None of what cannot be captured."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    call()
        except RuntimeError as error:
            print(f"not captured: {str(error).splitlines()[0]}")
            torch.cuda.set_stream(stream)  # torch stays on that of a capture that failed
            torch.cuda.synchronize()
            return None
        return graph.replay

    def _median(self, run: Call, *, alone: bool = False) -> float:
        times: list[float] = []
        while len(times) < ROUNDS and (len(times) < ROUNDS_LEAST or sum(times) < ROUNDS_S):
            times.append(self._once(run, alone=alone))
        return median(times)

    def _once(self, run: Call, *, alone: bool = False) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if alone:
            self._flush()
            torch.cuda._sleep(HOST_CYCLES)  # noqa: SLF001 - meanwhile the host launches
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def roofline(watch: Stopwatch, scale: int) -> tuple[float, float]:
    """Bytes and bfloat16 FLOPs per second that plain torch reaches; both sides of a copy count."""
    source = torch.randint(256, (COPY_BYTES // scale,), dtype=torch.uint8)
    target, side = torch.empty_like(source), MATRIX * 16 // max(16, scale)
    a, b = normal(side, side), normal(side, side)
    return (
        2 * source.numel() / watch.seconds(lambda: target.copy_(source)),
        2.0 * side**3 / watch.seconds(lambda: a @ b),
    )


def timed_peers(watch: Stopwatch, work: Work) -> dict[str, float | str]:
    """Seconds of each, or why there are none."""
    found: dict[str, float | str] = {}
    for name, prepare in work.peers.items():
        try:
            found[name] = watch.seconds(prepare())
        except ImportError:
            found[name] = "not installed"
        except Exception as error:  # noqa: BLE001 - whatever ails a peer, our own figures stay
            found[name] = f"failed: {error!r:.200}"
    return found


def measured(watch: Stopwatch, work: Work, bytes_s: float, flops_s: float) -> dict[str, Any]:
    own_s = watch.seconds(work.call)
    least_s = max(work.num_bytes / bytes_s, work.flops / flops_s)
    peers = timed_peers(watch, work)
    ratios = [f"{name} {took / own_s:.2f}x" for name, took in peers.items() if isinstance(took, float)]
    bound = "memory" if work.num_bytes / bytes_s == least_s else "compute"
    figures = f"{own_s * 1e6:12.1f}{least_s * 1e6:12.1f}{least_s / own_s:8.0%}"
    print(f"{work.name:40}{figures} {bound:9}{', '.join(ratios)}", flush=True)
    return {
        "name": work.name, "seconds": own_s, "roofline_seconds": least_s, "share": least_s / own_s,
        "bound": bound, "num_bytes": work.num_bytes, "flops": work.flops, "peers": peers, "goal": work.goal,
    }  # fmt: skip


def goals(found: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each row that has a goal: its share of the roofline, or the least ratio to a peer."""
    lines: list[str] = []
    for row in found:
        goal, share = row["goal"], row["share"]
        ratios = [took / row["seconds"] for took in row["peers"].values() if isinstance(took, float)]
        if goal is None:
            continue
        if goal != "peers":
            reached, what = share >= goal, f"{share:.0%} of the roofline, wanted {goal:.0%}"
        elif ratios:
            reached, what = min(ratios) >= 1, f"{min(ratios):.2f} x the best peer's speed"
        else:
            reached, what = False, "no peer ran"
        lines.append(f"{'reached' if reached else 'MISSED':8}{row['name']:40}{what}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="receives gpu_kernels.json")
    parser.add_argument("--tiny", action="store_true", help="to see that it runs, without a device")
    parser.add_argument("--once", action="store_true", help="call each operator once, for a profiler")
    parser.add_argument("--names", default="", help="times those alone whose name has this in it")
    parser.add_argument("--limit-s", type=float, default=420.0, help="starts nothing after this time")
    args = parser.parse_args()
    if args.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which the operators do
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device here: --tiny runs without one")
    begun, shape = time.monotonic(), TINY if args.tiny else Shape()
    device = torch.device("cpu" if args.tiny else "cuda")
    torch.set_default_device(device)
    torch.manual_seed(0)
    ops = operators("triton", args.folder)
    if args.once:
        for work in works(shape, ops):
            work.call()
        return
    watch = Stopwatch(device)
    bytes_s, flops_s = roofline(watch, 4096 if args.tiny else 1)
    found: dict[str, Any] = {
        "device": "none" if args.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__, "copy_bytes_s": bytes_s, "matmul_flops_s": flops_s,
        "shape": asdict(shape), "works": [],
    }  # fmt: skip
    print(f"{found['device']}: copy {bytes_s / 1e12:.2f} TB/s, bfloat16 {flops_s / 1e12:.0f} TFLOP/s")
    print(f"{'one layer':40}{'us':>12}{'roofline us':>12}{'share':>8} {'bound':9}peers, their time over ours")
    args.folder.mkdir(parents=True, exist_ok=True)
    for work in works(shape, ops):
        if not re.search(args.names, work.name):
            continue
        found["works"].append(measured(watch, work, bytes_s, flops_s))
        (args.folder / "gpu_kernels.json").write_text(json.dumps(found, indent=1))
        if time.monotonic() - begun > args.limit_s:
            print(f"stopped after {args.limit_s:.0f} s: what is missing was not begun")
            break
    if not args.tiny:  # nothing has a goal in an interpreter
        print(*goals(found["works"]), sep="\n")


if __name__ == "__main__":
    main()
