"""Compile a grammar in a child process first, which the kernel kills when it takes too long.

python -m tidemill.workers.execution.grammar_trial    tries what it reads from its standard input

A call of llguidance cannot be interrupted, and few characters can keep it busy for minutes. The child is
started with the first grammar and kept. Its standard input ends with its worker, and so does the child.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from threading import Lock

from tidemill.workers.execution.grammar_library import FIELD, compile_grammar, read_tokenizer, refusal
from tidemill.workers.messages import Grammar, RequestError

COMPILE_S_MAX = 1.0
"""The CPU time of one compilation."""

ANSWER_S_MAX = 20.0
"""The time to wait for the child, which may share its core with many others."""

MEMORY_BYTES = 1 << 30
"""The memory that the child may reserve beyond what it has after its start."""

NICE = 5


class GrammarTrial:
    """The child process of one worker. `refuse` may be called from any thread."""

    def __init__(self, tokenizer_json: Path, eos_ids: list[int], lexer_states: int) -> None:
        self._head = json.dumps([str(tokenizer_json), eos_ids, lexer_states]).encode() + b"\n"
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def refuse(self, grammar: Grammar) -> None:
        """Raise the RequestError that compiling `grammar` raises, or one if it takes too long."""
        with self._lock:
            reply = self._ask(grammar)
        if reply is None:
            raise refusal(
                grammar,
                f"it takes more than {COMPILE_S_MAX:g} s or {MEMORY_BYTES >> 30} GiB to compile: "
                "simplify it, for example with fewer patterns, alternatives or repetitions",
            )
        if reply:
            raise RequestError(reply, param=FIELD)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, grammar: Grammar) -> str | None:
        """Return the refusal of the child, "" for none, or None if the child did not answer."""
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps([grammar.kind, grammar.text]).encode() + b"\n")
            child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], ANSWER_S_MAX)
            line = child.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if line.endswith(b"\n"):
            return str(json.loads(line))
        self._end()
        return None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is None or self._child.poll() is not None:
            self._end()
            command = [sys.executable, "-m", "tidemill.workers.execution.grammar_trial"]
            self._child = subprocess.Popen(  # noqa: S603  our own command
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self._child.stdin is not None
            self._child.stdin.write(self._head)
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def main() -> None:
    os.nice(NICE)
    path, eos_ids, lexer_states = json.loads(sys.stdin.buffer.readline())
    tokenizer = read_tokenizer(Path(path).read_text(encoding="utf-8"), eos_ids)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside a call of the library
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S_MAX)
        reason = ""
        try:
            compile_grammar(tokenizer, Grammar(kind=kind, text=text), lexer_states)
        except RequestError as error:
            reason = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reason).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
