"""Run everything that abuses a server, and print a table of verdicts: `make abuse`.

ABUSE_SOAK_S is the length of the soak in seconds (180), ABUSE_ROUNDS the rounds of each measured attack (1).
Arguments are words of the parts to run. The exit status is the number of parts that missed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

ROUNDS = int(os.environ.get("ABUSE_ROUNDS", "1"))
SOAK_S = int(os.environ.get("ABUSE_SOAK_S", "180"))
ALL_S_MAX = 1320.0 * ROUNDS + SOAK_S
"""The time of all parts together. Those that have not run by then are too late."""

END_S_MAX = 30.0
"""The time in which a part that was interrupted must stop its servers."""


@dataclass(frozen=True, slots=True)
class Part:
    """A module with its arguments. It misses with a status other than 0, or after `s_max` seconds."""

    arguments: Sequence[str]
    s_max: float


def tests(*paths: str, s_max: float = 120.0) -> Part:
    return Part(("pytest", "-q", *paths), s_max)


def attacks(*options: str, s_max: float) -> Part:
    rounds = ("--rounds", str(ROUNDS), "--output", os.devnull)
    return Part(("benchmarks.serving.abuse", *rounds, *options), s_max * ROUNDS)


EDGE, CLI = "tests/unit/cluster/edge", "tests/unit/cluster/cli"
CROWDS = ("--rounds", "0", "--bomb-rounds", "0", "--crowd-rounds", str(ROUNDS), "--output", os.devnull)
PARTS: dict[str, Part] = {
    "limits of connections, bodies and clients": tests(
        f"{EDGE}/http/test_connection.py",
        f"{EDGE}/http/test_tokenize.py",
        f"{EDGE}/requests/test_limits.py",
        f"{EDGE}/requests/test_json_body.py",
        f"{EDGE}/grpc_api/test_edges.py",
    ),
    "keys, TLS, rules of security": tests(
        f"{CLI}/test_security.py",
        f"{CLI}/test_security_rules.py",
        f"{EDGE}/requests/test_api_keys.py",
        "tests/tidy/test_security.py",
    ),
    "control tokens in chats": tests(f"{EDGE}/chat/test_control_tokens.py"),
    "grammars": tests("tests/unit/workers/execution/test_grammar_bombs.py"),
    "faults of the machine": tests("tests/e2e/machine", s_max=420.0),
    "crowds with grammars": Part(("benchmarks.serving.strangers", *CROWDS), 120.0 * ROUNDS),
    "bodies": attacks("--only", "body", s_max=300.0),
    "floods": attacks("--only", "flood", s_max=360.0),
    "a flood of handshakes": attacks("--tls", "--only", "handshake", s_max=60.0),
    "attacks over gRPC": attacks("--grpc", s_max=330.0),
    "soak": Part(("benchmarks.serving.abuse", "--soak-s", str(SOAK_S)), SOAK_S + 90.0),
}


def run(part: Part, left_s: float) -> str:
    """Return the verdict on a part, which takes at most `left_s`. Nothing that it started remains."""
    if left_s <= 0:
        return "TOO LATE"
    process = subprocess.Popen([sys.executable, "-m", *part.arguments])
    try:
        return "MISSED" if process.wait(min(part.s_max, left_s)) else "good"
    except subprocess.TimeoutExpired:
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, remaining = psutil.wait_procs([psutil.Process(process.pid), *started], END_S_MAX)
        for left in remaining:
            left.kill()
        process.wait()
        return "TOO LONG"


def main(words: Sequence[str]) -> int:
    chosen = {name: part for name, part in PARTS.items() if not words or any(word in name for word in words)}
    rows: list[tuple[str, str, float]] = []
    end_s = time.monotonic() + ALL_S_MAX
    for name, part in chosen.items():
        sys.stdout.write(f"== {name}\n")
        sys.stdout.flush()
        began_s = time.monotonic()
        rows.append((name, run(part, end_s - began_s), time.monotonic() - began_s))
    sys.stdout.write(f"\n{'part':44} {'verdict':8} {'seconds':>8}\n")
    for name, verdict, seconds in rows:
        sys.stdout.write(f"{name:44} {verdict:8} {seconds:8.0f}\n")
    return sum(verdict != "good" for _, verdict, _ in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
