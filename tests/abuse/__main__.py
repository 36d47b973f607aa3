"""Run everything that abuses a server, and print a table of verdicts: `make abuse`.

ABUSE_SOAK_S is the length of the soak in seconds (60), ABUSE_ROUNDS the most rounds of a measured attack (3).
Arguments are words of the parts to run.
The exit status is the number of parts that are neither good nor just not judged.
docs/abuse.md has each attack and fault with the test that shows what holds.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil
from benchmarks.serving.verdicts import GOOD, MISSED, NOT_JUDGED, STATUSES

ROUNDS = os.environ.get("ABUSE_ROUNDS", "3")
SOAK_S = int(os.environ.get("ABUSE_SOAK_S", "60"))
END_S_MAX = 30.0
"""The time in which a part that was interrupted must stop its servers."""

STOP_S_MAX = 15.0
"""The time that a measurement takes after its last attack."""

ALL_S_MAX = 1700.0
"""The sum of all shares with a soak of 60 s."""

SERVER_S_MAX = 30.0
"""The time in which a server starts and ends."""

TOO_LONG = "too long"


@dataclass(frozen=True, slots=True)
class Part:
    """A module with its arguments. It takes `share_s` seconds, and what earlier parts have left of theirs.

    A part that `takes_time` has an option for it, and lists what it had no time for.
    """

    arguments: Sequence[str]
    share_s: float
    takes_time: bool = False


def tests(*paths: str, share_s: float) -> Part:
    return Part(("pytest", "-q", "-n", "2", "--dist", "loadfile", *paths), share_s)


def attacks(*options: str, share_s: float) -> Part:
    rounds = ("--rounds", ROUNDS, "--output", os.devnull)
    return Part(("benchmarks.serving.abuse", *rounds, *options), share_s, takes_time=True)


EDGE, CLI = "tests/unit/cluster/edge", "tests/unit/cluster/cli"
CROWDS = ("--rounds", "0", "--bomb-rounds", "0", "--crowd-rounds", "1", "--output", os.devnull)
PARTS: Mapping[str, Part] = {
    "limits of connections, bodies and clients": tests(
        f"{EDGE}/http/test_connection.py",
        f"{EDGE}/http/test_errors.py",
        f"{EDGE}/http/test_tokenize.py",
        f"{EDGE}/requests/test_limits.py",
        f"{EDGE}/requests/test_json_body.py",
        f"{EDGE}/grpc_api/test_edges.py",
        f"{EDGE}/grpc_api/test_frames.py",
        "tests/unit/cluster/processes/endpoint/test_handshakes.py",
        "tests/unit/cluster/processes/joining/test_joining.py",
        share_s=45.0,
    ),
    "keys, TLS, rules of security": tests(
        f"{CLI}/test_security.py",
        f"{EDGE}/requests/test_api_keys.py",
        f"{EDGE}/http/test_same_origin.py",
        "tests/unit/kvstore/test_files.py",
        "tests/unit/kvstore/test_periodic.py",
        "tests/tidy/test_security.py",
        share_s=30.0,
    ),
    "control tokens in chats": tests(f"{EDGE}/chat/test_control_tokens.py", share_s=20.0),
    "templates and tokenizers": tests(
        f"{EDGE}/chat/test_template_process.py", f"{EDGE}/chat/test_tokenizer_files.py", share_s=60.0
    ),
    "wrong model folders, and signals to a start": tests(
        "tests/unit/workers/models/test_loading.py",
        "tests/e2e/test_launch.py",
        "tests/e2e/machine/test_starts.py",
        share_s=150.0,
    ),
    "records and batches": tests(
        f"{EDGE}/records",
        "tests/e2e/lifecycle/test_frontends.py::test_batch_has_each_line_once_whatever_edge_is_killed",
        share_s=200.0,
    ),
    "grammars": tests(
        "tests/unit/workers/execution/test_grammar_limits.py",
        share_s=30.0,
    ),
    "faults of the machine": tests(
        "tests/e2e/machine", "--ignore=tests/e2e/machine/test_starts.py", share_s=260.0
    ),
    "crowds with grammars": Part(("benchmarks.serving.strangers", *CROWDS), 75.0),
    "bodies": attacks("--kind", "body", share_s=200.0),
    "floods": attacks("--kind", "flood", share_s=200.0),
    "resets of connections": attacks("--kind", "reset", share_s=90.0),
    "floods over TLS": attacks("--tls", "--only", "handshake", "without end", "pipelined", share_s=85.0),
    "attacks over gRPC": attacks("--grpc", share_s=165.0),
    "soak": Part(("benchmarks.serving.abuse", "--soak-s", str(SOAK_S)), SOAK_S + SERVER_S_MAX),
}
assert sum(part.share_s for part in PARTS.values()) <= ALL_S_MAX - 60.0 + SOAK_S


def run(part: Part, left_s: float) -> str:
    """Return the verdict on a part, which takes at most `left_s`. Nothing that it started remains."""
    more = ("--s-max", f"{left_s - STOP_S_MAX:.0f}") if part.takes_time else ()
    process = subprocess.Popen([sys.executable, "-m", *part.arguments, *more])
    try:
        status = process.wait(left_s)
    except subprocess.TimeoutExpired:
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, remaining = psutil.wait_procs([psutil.Process(process.pid), *started], END_S_MAX)
        for left in remaining:
            left.kill()
        process.wait()
        return TOO_LONG
    return {number: verdict for verdict, number in STATUSES.items()}.get(status, MISSED)


def main(words: Sequence[str]) -> int:
    chosen = {name: part for name, part in PARTS.items() if not words or any(word in name for word in words)}
    rows: list[tuple[str, str, float, float]] = []
    end_s = time.monotonic()
    for name, part in chosen.items():
        sys.stdout.write(f"== {name}\n")
        sys.stdout.flush()
        began_s = time.monotonic()
        end_s += part.share_s
        verdict = run(part, end_s - began_s)
        rows.append((name, verdict, time.monotonic() - began_s, part.share_s))
    sys.stdout.write(f"\n{'part':44} {'seconds':>8} {'share':>8}  verdict\n")
    for name, verdict, seconds, share_s in rows:
        sys.stdout.write(f"{name:44} {seconds:8.0f} {share_s:8.0f}  {verdict}\n")
    return sum(verdict not in (GOOD, NOT_JUDGED) for _, verdict, _, _ in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
