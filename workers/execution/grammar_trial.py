"""Compile a grammar in a child process first, which the kernel kills when it takes too long.

python -m tidemill.workers.execution.grammar_trial    tries what it reads from its standard input
"""

import os
from dataclasses import asdict
from pathlib import Path
from threading import Lock

import msgspec

from tidemill.workers.bounded_child import MEMORY_BYTES, BoundedChild, answer_questions, head_of_parent
from tidemill.workers.execution.grammar_library import FIELD, compile_grammar, read_tokenizer, refusal
from tidemill.workers.messages import Grammar, RequestError
from tidemill.workers.models.model_files import read_text

COMPILE_S_MAX = 1.0
"""The CPU time of one compilation."""

NICE = 5


class GrammarTrial:
    """The child process of one worker. `refuse` may be called from any thread."""

    def __init__(self, tokenizer_json: Path, eos_ids: list[int], lexer_states: int) -> None:
        self._child = BoundedChild(
            "tidemill.workers.execution.grammar_trial", [str(tokenizer_json), eos_ids, lexer_states]
        )
        self._lock = Lock()

    def refuse(self, grammar: Grammar) -> None:
        """Raise the RequestError that compiling `grammar` raises, or one if it takes too long."""
        with self._lock:
            reply: str | None = self._child.ask(asdict(grammar))
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
            self._child.close()


def main() -> None:
    os.nice(NICE)
    path, eos_ids, lexer_states = head_of_parent()
    tokenizer = read_tokenizer(read_text(Path(path)), eos_ids)

    def reason(question: dict[str, object]) -> str:
        try:
            compile_grammar(tokenizer, msgspec.convert(question, Grammar), lexer_states)
        except RequestError as error:
            return str(error)
        return ""

    answer_questions(reason, COMPILE_S_MAX)


if __name__ == "__main__":
    main()
