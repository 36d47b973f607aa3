"""Spend the first minutes on a GPU: calls of one table of verdicts each. The first one answers most.

    python -m benchmarks.gpu.minutes 0 --folder FOLDER --parcel dist/gpu-parcel/parcel.tar.xz --archive FILE
    python benchmarks/gpu/minutes.py 1 --folder FOLDER                              is it right
    python benchmarks/gpu/minutes.py 2 --folder FOLDER [--peers PEERS]              kernels, and engine steps
    python benchmarks/gpu/minutes.py 3 --folder FOLDER                              the whole server
    python benchmarks/gpu/minutes.py 4 --folder FOLDER                              several ranks of a worker

It runs from the root of a checkout and needs the standard library alone. `--parcel` is installed into
FOLDER first (`make gpu-parcel` collects it), without a network. FOLDER keeps Triton's cache, the output of
each piece and `call-N.json`. A call takes at most 560 s, call 0 at most 540: each piece has a bound, and one
that exceeds it is killed with all that it started. A verdict is printed when it falls, with the tests that
failed, and after each piece FILE has the output of all, also of those that still run.
PEERS is a folder of modules of other engines (`fused_moe.py` with vLLM's
`fused_experts`). `--device cpu` tries all of it at small sizes.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CALL_S_MAX = 560.0
FIRST_S_MAX = 540.0
INSTALL_S_MAX = 30.0
END_S = 5.0
"""Kept for the end of a call: killing a piece, and the table."""
KILL_S_MAX = 3.0
"""Processes that a driver holds for longer are left behind."""

MARK = "TIDEMILL_MINUTES"
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-o",
    "pythonpath=.",
    "-W",
    "default",
    "-p",
    "no:cacheprovider",
    "-rfE",
)
PROFILED = "regex:gate_up_tile|down_tile|attend_span|attend_rows|attend_tile|recur|prepare|advance|weigh_part"
ONE_OF_EACH = (
    "definition and ((attention and mixed and sinks and not window) or (recurrences and strong) or into)"
)
RACING = "definition and ((draw and 300) or into)"
METRICS = (
    "launch__registers_per_thread,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active"
)
PRINT_CHAT = """
import logging, sys, time, traceback
from tidemill import LLM, SamplingParams
logging.basicConfig(level=logging.INFO)
device, *ways = sys.argv[1:]
failed = 0
for way in ways:
    more = {"memory": "256MiB", "kv_cache_dtype": "float32", "backing": "fixed"} if way != "defaults" else {}
    more |= {} if way in {"defaults", "graphs"} else {way: "bfloat16" if way == "state_dtype" else True}
    start_s = time.monotonic()
    try:
        with LLM("keeper", device=device, **more) as llm:
            asked = [{"role": "user", "content": "Hello"}]
            (found,) = llm.chat(asked, SamplingParams(temperature=0, max_tokens=12), progress=False)
            assert found.outputs[0].token_ids
            print(f"== {way}: {found.outputs[0].text!r} after {time.monotonic() - start_s:.1f} s", flush=True)
    except Exception:
        failed += 1
        traceback.print_exc()
        print(f"== {way}: FAILED", flush=True)
sys.exit(failed)
"""
NOTED = ("FAILED ", "ERROR ", "== ")
"""Beginnings of lines of a piece's output that are printed with its verdict."""
NOTED_MAX = 20

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
    FOLDER, if it left anything. `beside`: it runs beside the pieces after it."""

    name: str
    s_max: float
    command: Command
    on_cpu: Command | None = None
    needs: str = ""
    gpus: int = 1
    figures: Callable[[Path], list[Verdict]] | None = None
    beside: bool = False


Judge = Callable[[Piece, float], list[Verdict]]
"""Runs a piece for some seconds at most."""


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
    gpu = [f"tests/gpu/test_{name}.py" for name in ("operators", "architectures", "engine")]
    match call:
        case 0:
            return first_pieces(folder, chat, workers, gpu)
        case 1:
            return [
                Piece("device", 15, ("nvidia-smi",)),
                Piece(
                    "operators compile", 45, module("tidemill.kernels.dispatch"),
                    module("tidemill.kernels.dispatch"),
                ),
                Piece("one chat", 50, (*chat, "cuda", "graphs"), (*chat, "cpu", "graphs")),
                Piece(
                    "operators, far arena", 120, (*PYTEST, *workers, gpu[0]),
                    (*PYTEST, "tests/triton/test_routing.py"),
                ),
                Piece("architectures, engine", 110, (*PYTEST, *gpu[1:]), (*PYTEST, "--co", *gpu[1:])),
                Piece(
                    "staging, kvcached", 50,
                    (*PYTEST, "tests/gpu/test_staging.py", "tests/gpu/test_kvcached.py"),
                ),
                Piece(
                    "memory accesses", 50,
                    (
                        "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "3", *PYTEST, gpu[0],
                        "-k", ONE_OF_EACH, "--maxfail", "1",
                    ),
                    needs="compute-sanitizer",
                ),
                Piece(
                    "races", 40,
                    (
                        "compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "3", *PYTEST, gpu[0],
                        "-k", RACING, "--maxfail", "1",
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
                Piece("ranks that launch ahead", 50, module(ranks, "ahead"), gpus=2),
            ]  # fmt: skip


def first_pieces(folder: Path, chat: Command, workers: Command, gpu: Sequence[str]) -> list[Piece]:
    """Return the pieces of call 0: each is the shortest that decides what to do next."""
    engine, kernels = "benchmarks.gpu.engine", "benchmarks.gpu.kernels"
    sources = next(iter((folder / "parcel").glob("kvcached-*.tar.gz")), folder / "kvcached.tar.gz")
    build = ("--no-index", "--no-deps", "--no-build-isolation", "--target", folder / "kvcached", sources)
    names = "experts|attention|delta|draw|scores"
    return [
        Piece("device", 10, ("nvidia-smi",)),
        Piece("kvcached is compiled", 300, module("pip", "install", "--quiet", *build), beside=True),
        Piece(
            "chat", 60, (*chat, "cuda", "enforce_eager", "graphs", "async_scheduling", "state_dtype"),
            (*chat, "cpu", "enforce_eager", "graphs"),
        ),
        Piece(
            "operators, far arena", 85, (*PYTEST, *workers, "--maxfail", "20", gpu[0]),
            (*PYTEST, "tests/triton/test_routing.py"),
        ),
        Piece(
            "steps of an engine", 105, module(engine, "--folder", folder, "--layers", 8, "--short"),
            module(engine, "--folder", folder, "--tiny"), figures=step_verdicts,
        ),
        Piece(
            "kernels", 45, module(kernels, "--folder", folder, "--limit-s", 40, "--names", names),
            module(kernels, "--folder", folder, "--tiny", "--limit-s", 30, "--names", "draw|scores"),
            figures=kernel_verdicts,
        ),
        Piece(
            "architectures, ways of an engine", 45, (*PYTEST, *workers, *gpu[1:], "-k", "likely or ways"),
            (*PYTEST, "--co", *gpu[1:]),
        ),
        Piece("default backing", 35, (*chat, "cuda", "defaults"), (*chat, "cpu", "defaults")),
        Piece(
            "kvcached", 20, (*PYTEST, "tests/gpu/test_kvcached.py"), (*PYTEST, "tests/gpu/test_kvcached.py"),
        ),
        Piece(
            "tiles of experts", 40, module("benchmarks.gpu.sweep", "--folder", folder, "--limit-s", 37),
            module("benchmarks.gpu.sweep", "--folder", folder, "--tiny", "--limit-s", 5),
        ),
        Piece(
            "server: kill", 50, module("benchmarks.gpu.served", "kill", "--folder", folder),
            module("benchmarks.gpu.served", "kill", "--folder", folder, "--device", "cpu"),
            figures=served_verdicts,
        ),
    ]  # fmt: skip


def kill_marked(mark: str) -> bool:
    """Kill every process whose mark in its environment begins so, in whichever session it runs, and return
    whether there was one."""
    found = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            begins = f"{MARK}={mark}".encode()
            if any(entry.startswith(begins) for entry in path.read_bytes().split(b"\0")):
                found = True
                os.kill(int(path.parent.name), signal.SIGKILL)
    return found


def run(command: Command, s_max: float, log: Path, environment: Mapping[str, str]) -> str:
    """Return the verdict on a command that takes at most `s_max` seconds. Nothing that it started remains."""
    mark = f"{os.getpid()}-{log.stem}."
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


def log_of(piece: Piece, folder: Path) -> Path:
    return folder / f"{piece.name.replace(' ', '-').replace(',', '').replace(':', '')}.log"


def noted(log: Path) -> list[str]:
    """Return the lines of a piece that are worth reading with its verdict."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line for line in lines if line.startswith(NOTED)][:NOTED_MAX]


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
    log = log_of(piece, folder)
    began_s = time.monotonic()
    verdict = run(command, min(piece.s_max, left_s), log, environment)
    took = f"{time.monotonic() - began_s:.0f} s: {last_line(log)}"
    return [Verdict(piece.name, took, f"<= {piece.s_max:.0f} s", verdict)]


def environment_of(folder: Path, peers: Path | None, *, cpu: bool) -> dict[str, str]:
    paths = [
        folder / "site",
        folder / "kvcached",
        ROOT,
        *([peers.resolve()] if peers else []),
        os.environ.get("PYTHONPATH"),
    ]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "PATH": os.pathsep.join([str(folder / "site/bin"), os.environ.get("PATH", "")]),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONUNBUFFERED": "1",
        "LDFLAGS": "-Wl,--no-as-needed",  # kvcached needs the driver's library, though it names no symbol
    }
    return {**found, "TRITON_INTERPRET": "1"} if cpu else found


LINE = "{0.what:40} {0.figure:72} {0.goal:10} {0.verdict}"


class Report:
    """The verdicts of a call so far: printed when they fall, and kept in FOLDER and in an archive."""

    def __init__(self, call: int, folder: Path, archive: Path | None) -> None:
        self.rows: list[Verdict] = []
        self._path = folder / f"call-{call}.json"
        self._folder = folder
        self._archive = archive
        self._lock = Lock()

    def add(self, rows: Sequence[Verdict], lines: Sequence[str] = ()) -> None:
        with self._lock:
            self.rows += rows
            for row in rows:
                print(LINE.format(row), flush=True)
            print(
                *(f"    {line}" for line in lines),
                sep="\n" if lines else "",
                end="\n" if lines else "",
                flush=True,
            )
            self._path.write_text(json.dumps([asdict(row) for row in self.rows], indent=1))
            self.save()

    def save(self) -> None:
        """Write the archive: all of it is there, or what was there before."""
        if self._archive is None:
            return
        part = self._archive.with_suffix(".part")
        with tarfile.open(part, "w:gz") as archive:
            for path in sorted([*self._folder.glob("*.log"), *self._folder.glob("*.json")]):
                archive.add(path, path.name)
        part.replace(self._archive)


def installed(parcel: Path, folder: Path) -> Piece:
    """Return the piece that unpacks the parcel and installs its wheels."""
    target, unpacked = folder / "site", folder / "parcel"
    pip = f"{sys.executable} -m pip install --quiet --no-index --no-deps --upgrade --target {target}"
    command = f"mkdir -p {unpacked} && tar xf {parcel.resolve()} -C {unpacked} && {pip} {unpacked}/*.whl"
    return Piece("the parcel is installed", INSTALL_S_MAX, ("sh", "-c", command), ("sh", "-c", command))


def run_all(pieces: Sequence[Piece], report: Report, end_s: float, judge: Judge, folder: Path) -> None:
    """Run the pieces, and those that run beside others on threads, until `end_s`."""
    beside: list[Thread] = []

    def run_one(piece: Piece) -> None:
        rows = judge(piece, end_s - time.monotonic())
        report.add(rows, noted(log_of(piece, folder)))

    for piece in pieces:
        if piece.beside:
            beside.append(Thread(target=run_one, args=(piece,), daemon=True))
            beside[-1].start()
        else:
            run_one(piece)
    for thread in beside:
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", type=int, choices=(0, 1, 2, 3, 4))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--parcel", type=Path, help="the archive of wheels to install first")
    parser.add_argument("--archive", type=Path, help="receives all output, as .tar.gz")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, help="seconds of the whole call (560; call 0: 540)")
    args = parser.parse_args()
    limit_s = args.limit_s or (CALL_S_MAX if args.call else FIRST_S_MAX)
    end_s = time.monotonic() + limit_s - END_S
    folder, cpu = args.folder.resolve(), args.device == "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    environment = environment_of(folder, args.peers, cpu=cpu)
    report = Report(args.call, folder, args.archive)
    judge = partial(verdicts_on, folder=folder, environment=environment, cpu=cpu)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if args.parcel:  # before other pieces are made, which look for its files
            run_all([installed(args.parcel, folder)], report, end_s, judge, folder)
        pieces = pieces_of(args.call, folder)
        run_all(pieces, report, end_s, judge, folder)
        for figures in dict.fromkeys(piece.figures for piece in pieces if piece.figures):
            found = figures(folder)
            if cpu:  # figures of small sizes in an interpreter say nothing about a goal
                found = [replace(row, verdict="tried") if row.goal[:2] == ">=" else row for row in found]
            report.add(found)
    finally:
        kill_marked(f"{os.getpid()}-")
        report.save()
    return sum(row.verdict in {"MISSED", "TOO LONG", "TOO LATE"} for row in report.rows)


if __name__ == "__main__":
    sys.exit(main())
