"""Spend the first thirty minutes on a GPU: four calls, each with one table of verdicts.

    python benchmarks/gpu/minutes.py 1 --folder FOLDER --parcel dist/gpu-parcel     is it right
    python benchmarks/gpu/minutes.py 2 --folder FOLDER [--peers PEERS]              kernels, and engine steps
    python benchmarks/gpu/minutes.py 3 --folder FOLDER                              the whole server
    python benchmarks/gpu/minutes.py 4 --folder FOLDER                              several ranks of a worker

It runs from the root of a checkout and needs the standard library alone. `--parcel` is installed into
FOLDER first (`make gpu-parcel` collects it), without a network. FOLDER keeps Triton's cache, the output of
each piece and `call-N.json`. A call takes at most 560 s: each piece has a bound, and one that exceeds it is
killed with all that it started. PEERS is a folder of modules of other engines (`fused_moe.py` with vLLM's
`fused_experts`). `--device cpu` tries all of it at small sizes.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CALL_S_MAX = 560.0
END_S = 5.0
"""Kept for the end of a call: killing a piece, and the table."""
KILL_S_MAX = 3.0
"""Processes that a driver holds for longer are left behind."""

MARK = "TIDEMILL_MINUTES"
PYTEST = (sys.executable, "-m", "pytest", "-o", "pythonpath=.", "-W", "default", "-p", "no:cacheprovider")
PROFILED = "regex:gate_up_tile|down_tile|attend_span|attend_rows|attend_tile|recur|prepare|advance|draw_row"
METRICS = (
    "launch__registers_per_thread,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active"
)
PRINT_CHAT = """
import sys
from tidemill import LLM, SamplingParams
more = {"memory": "256MiB", "kv_cache_dtype": "float32"} | {name: True for name in sys.argv[2:]}
with LLM("keeper", device=sys.argv[1], backing="fixed", **more) as llm:
    asked = [{"role": "user", "content": "Hello"}]
    (found,) = llm.chat(asked, SamplingParams(temperature=0, max_tokens=12), progress=False)
    print(found.outputs[0].text)
    assert found.outputs[0].token_ids
"""

Command = Sequence[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    what: str
    figure: str
    goal: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A process with a bound. `on_cpu` replaces the command there (None: it needs a GPU). `needs` is a
    program without which it does not run, `gpus` the number that it takes. `figures` reads what it left in
    FOLDER, if it left anything."""

    name: str
    s_max: float
    command: Command
    on_cpu: Command | None = None
    needs: str = ""
    gpus: int = 1
    figures: Callable[[Path], list[Verdict]] | None = None


def reached(what: str, value: float, goal: float | None, unit: str = "of the roofline") -> Verdict:
    verdict = "figure" if goal is None else "reached" if value >= goal else "MISSED"
    return Verdict(what, f"{value:.2f} {unit}", "" if goal is None else f">= {goal:.2f}", verdict)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def kernel_verdicts(folder: Path) -> list[Verdict]:
    found: list[Verdict] = []
    for row in read(folder / "gpu_kernels.json").get("works", ()):
        is_share = isinstance(row["goal"], float)
        found.append(reached(row["name"], row["share"], row["goal"] if is_share else None))
        for name, took in row["peers"].items():
            if isinstance(took, float):
                goal = 0.7 if name == "flashinfer" else 1.0 if row["goal"] == "peers" else None
                found.append(reached(row["name"], took / row["seconds"], goal, f"of {name}'s speed"))
            elif took != "not installed":
                found.append(Verdict(row["name"], f"{name}: {took:.60}", "", "peer FAILED"))
    return found


def step_verdicts(folder: Path) -> list[Verdict]:
    rows = read(folder / "gpu_engine.json").get("steps", ())
    return [reached(row["name"], row["share"], row.get("goal")) for row in rows]


def served_verdicts(folder: Path) -> list[Verdict]:
    return [Verdict(**row) for rows in read(folder / "served.json").values() for row in rows]


def module(name: str, *arguments: object) -> Command:
    return (sys.executable, "-m", name, *map(str, arguments))


def pieces_of(call: int, folder: Path) -> list[Piece]:
    """Return what stops everything first, then what can silently be wrong, then what is slow."""
    chat = (sys.executable, "-c", PRINT_CHAT)
    workers = ("-n", str(max(1, (os.cpu_count() or 2) - 2)))
    gpu = [f"tests/gpu/test_{name}.py" for name in ("operators", "page_copy", "architectures", "engine")]
    match call:
        case 1:
            return [
                Piece("device", 15, ("nvidia-smi",)),
                Piece(
                    "operators compile", 45, module("tidemill.kernels.dispatch"),
                    module("tidemill.kernels.dispatch"),
                ),
                Piece("one chat", 50, (*chat, "cuda"), (*chat, "cpu")),
                Piece(
                    "operators, far arena", 120, (*PYTEST, *workers, *gpu[:2]),
                    (*PYTEST, "tests/triton/test_routing.py", "tests/triton/test_page_copy.py"),
                ),
                Piece("architectures, engine", 140, (*PYTEST, *gpu[2:]), (*PYTEST, "--co", *gpu[2:])),
                Piece(
                    "staging, kvcached", 50,
                    (*PYTEST, "tests/gpu/test_staging.py", "tests/gpu/test_kvcached.py"),
                ),
                Piece(
                    "memory accesses", 60,
                    (
                        "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "3", *PYTEST, gpu[0],
                        "-k", "mixed and (attention or moe or recurrences)", "--maxfail", "1",
                    ),
                    needs="compute-sanitizer",
                ),
            ]  # fmt: skip
        case 2:
            kernels, engine = "benchmarks.gpu.kernels", "benchmarks.gpu.engine"
            return [
                Piece(
                    "steps of an engine", 290, module(engine, "--folder", folder),
                    module(engine, "--folder", folder, "--tiny"), figures=step_verdicts,
                ),
                Piece(
                    "kernels", 200, module(kernels, "--folder", folder, "--limit-s", 180),
                    module(kernels, "--folder", folder, "--tiny", "--limit-s", 60), figures=kernel_verdicts,
                ),
                Piece(
                    "use of memory and cores", 60,
                    (
                        "ncu", "--clock-control", "none", "--kernel-name", PROFILED, "--launch-count", "80",
                        "--metrics", METRICS, "--csv", *module(kernels, "--folder", folder, "--once"),
                    ),
                    module(kernels, "--folder", folder, "--tiny", "--once"), needs="ncu",
                ),
            ]  # fmt: skip
        case 3:
            served = "benchmarks.gpu.served"
            return [
                Piece(
                    f"server: {name}", s_max, module(served, name, "--folder", folder),
                    module(served, name, "--folder", folder, "--device", "cpu"), figures=served_verdicts,
                )
                for name, s_max in (("kill", 170), ("speed", 350))
            ]  # fmt: skip
        case _:
            ranks, served = "benchmarks.gpu.ranks", "benchmarks.gpu.served"
            return [
                Piece(
                    "two ranks on one GPU, gloo", 90, module(ranks, "gloo"),
                    module(ranks, "gloo", "--device", "cpu"),
                ),
                Piece(
                    "server: ranks", 180, module(served, "ranks", "--folder", folder),
                    module(served, "ranks", "--folder", folder, "--device", "cpu"), figures=served_verdicts,
                ),
                Piece("chat on a NUMA node", 50, (*chat, "cuda", "numa_bind")),
                Piece("ranks over NCCL", 90, module(ranks, "nccl"), gpus=2),
                Piece("sums in one launch", 90, module(ranks, "one-shot"), gpus=2),
            ]  # fmt: skip


def kill_marked(mark: str) -> bool:
    """Kill every process that has the mark in its environment, in whichever session it runs, and return
    whether there was one."""
    found = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found = True
                os.kill(int(path.parent.name), signal.SIGKILL)
    return found


def run(command: Command, s_max: float, log: Path, environment: Mapping[str, str]) -> str:
    """Return the verdict on a command that takes at most `s_max` seconds. Nothing that it started remains."""
    mark = f"{os.getpid()}-{log.stem}"
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603
            command, cwd=ROOT, env={**environment, MARK: mark}, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return "MISSED" if process.wait(max(s_max, 0.1)) else "good"
        except subprocess.TimeoutExpired:
            return "TOO LONG"
        finally:
            end_s = time.monotonic() + KILL_S_MAX
            while kill_marked(mark) and time.monotonic() < end_s:  # what it starts meanwhile, too
                time.sleep(0.05)
            process.wait()


def count_gpus() -> int:
    """Return the number of GPUs that the driver lists."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)  # noqa: S607
    return len(listed.stdout.splitlines())


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:60] if lines else ""


def verdicts_on(
    piece: Piece, left_s: float, folder: Path, environment: Mapping[str, str], *, cpu: bool
) -> list[Verdict]:
    command = piece.on_cpu if cpu else piece.command
    if command is None:
        return [Verdict(piece.name, "", "", "needs a GPU")]
    if not cpu and piece.needs and shutil.which(piece.needs) is None:
        return [Verdict(piece.name, "", "", f"needs {piece.needs}")]
    if not cpu and piece.gpus > 1 and count_gpus() < piece.gpus:
        return [Verdict(piece.name, "", "", f"needs {piece.gpus} GPUs")]
    if left_s <= 0:
        return [Verdict(piece.name, "", "", "TOO LATE")]
    log = folder / f"{piece.name.replace(' ', '-').replace(',', '').replace(':', '')}.log"
    began_s = time.monotonic()
    verdict = run(command, min(piece.s_max, left_s), log, environment)
    took = f"{time.monotonic() - began_s:.0f} s: {last_line(log)}"
    return [Verdict(piece.name, took, f"<= {piece.s_max:.0f} s", verdict)]


def environment_of(folder: Path, peers: Path | None, *, cpu: bool) -> dict[str, str]:
    paths = [folder / "site", ROOT, *([peers.resolve()] if peers else []), os.environ.get("PYTHONPATH")]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "PATH": os.pathsep.join([str(folder / "site/bin"), os.environ.get("PATH", "")]),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONUNBUFFERED": "1",
    }
    return {**found, "TRITON_INTERPRET": "1"} if cpu else found


def show(rows: Sequence[Verdict]) -> None:
    for row in (Verdict("what", "figure", "goal", "verdict"), *rows):
        print(f"{row.what:40} {row.figure:72} {row.goal:10} {row.verdict}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", type=int, choices=(1, 2, 3, 4))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--parcel", type=Path, help="wheels to install first")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=CALL_S_MAX, help="seconds of the whole call (560)")
    args = parser.parse_args()
    end_s = time.monotonic() + args.limit_s - END_S
    folder, cpu = args.folder.resolve(), args.device == "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    environment, pieces = environment_of(folder, args.peers, cpu=cpu), pieces_of(args.call, folder)
    if args.parcel:
        wheels = map(str, args.parcel.resolve().glob("*.whl"))
        install = ("--no-index", "--no-deps", "--upgrade", "--target", folder / "site", *wheels)
        command = module("pip", "install", "--quiet", *install)
        pieces.insert(0, Piece("the parcel is installed", 60, command, command))
    rows: list[Verdict] = []
    for piece in pieces:
        print(f"== {piece.name}", flush=True)
        rows += verdicts_on(piece, end_s - time.monotonic(), folder, environment, cpu=cpu)
        (folder / f"call-{args.call}.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    for figures in dict.fromkeys(piece.figures for piece in pieces if piece.figures):
        found = figures(folder)
        if cpu:  # figures of small sizes in an interpreter say nothing about a goal
            found = [replace(row, verdict="tried") if row.goal[:2] == ">=" else row for row in found]
        rows += found
    (folder / f"call-{args.call}.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    show(rows)
    return sum(row.verdict in {"MISSED", "TOO LONG", "TOO LATE"} for row in rows)


if __name__ == "__main__":
    sys.exit(main())
