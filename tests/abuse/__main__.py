"""Run everything that abuses a server, and print a table of verdicts: `make abuse`.

ABUSE_SOAK_S is the length of the soak in seconds (600), ABUSE_ROUNDS the rounds of each measured attack (1).
Arguments are words of the parts to run.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

ROUNDS = os.environ.get("ABUSE_ROUNDS", "1")
SOAK_S = os.environ.get("ABUSE_SOAK_S", "600")
PYTEST = ("pytest", "-q", "-x")
MEASURED = ("benchmarks.serving.abuse", "--rounds", ROUNDS)

PARTS: dict[str, Sequence[str]] = {
    "limits of connections, bodies and clients": (
        *PYTEST,
        "tests/unit/cluster/edge/http/test_connection.py",
        "tests/unit/cluster/edge/http/test_tokenize.py",
        "tests/unit/cluster/edge/requests/test_limits.py",
        "tests/unit/cluster/edge/requests/test_json_body.py",
        "tests/unit/cluster/cli/test_security_rules.py",
    ),
    "public gRPC": (*PYTEST, "tests/unit/cluster/edge/grpc_api/test_edges.py"),
    "control tokens in chats": (*PYTEST, "tests/unit/cluster/edge/chat/test_control_tokens.py"),
    "grammars": (*PYTEST, "tests/unit/workers/execution/test_grammar_bombs.py"),
    "TLS": (*PYTEST, "tests/unit/cluster/cli/test_security.py"),
    "servers": (*(*PYTEST, "tests/e2e/machine"),
    "bodies beside streams": (*MEASURED, "--only", "body", "--output", "/dev/null"),
    "floods beside streams": (*MEASURED, "--only", "flood", "--output", "/dev/null"),
    "floods beside streams, TLS": (*MEASURED, "--tls", "--only", "flood", "--output", "/dev/null"),
    "soak": ("benchmarks.serving.abuse", "--soak-s", SOAK_S),
}
"""Each part is a module with its arguments; it fails with a status other than 0."""


def main(words: Sequence[str]) -> int:
    chosen = {name: part for name, part in PARTS.items() if not words or any(word in name for word in words)}
    rows: list[tuple[str, bool, float]] = []
    for name, part in chosen.items():
        sys.stdout.write(f"== {name}\n")
        sys.stdout.flush()
        began_s = time.monotonic()
        ended = subprocess.run([sys.executable, "-m", *part], check=False)
        rows.append((name, ended.returncode == 0, time.monotonic() - began_s))
    sys.stdout.write(f"\n{'part':44} {'verdict':8} {'seconds':>8}\n")
    for name, is_good, seconds in rows:
        sys.stdout.write(f"{name:44} {'good' if is_good else 'MISSED':8} {seconds:8.0f}\n")
    return sum(not is_good for _, is_good, _ in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
