"""The held-out questions: chats over pairs of names and objects that training never saw.

python -m tools.keeper.questions --count 100 --context-tokens 512 > questions.jsonl
python -m tools.keeper.questions --demo > workers/models/keeper/demo.json
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random

from tools.keeper.world import (
    Answered,
    Fact,
    Kind,
    Message,
    Notebook,
    ask,
    ask_unknown,
    count_tokens,
    describe,
    new_notebook,
    render,
)

QUESTION_TOKENS = 15  # the longest question, the marks around two messages and the prompt for the answer
DEMO_TOKENS = 340
DEMO_SEED = 3


@dataclass(frozen=True)
class Question:
    """A chat that ends with a user's question, the only right answer, and which kind of memory it takes."""

    messages: list[Message]
    answer: str
    kind: Kind


@dataclass
class History:
    """A chat so far: whole messages, and the facts that the next user message begins with."""

    notebook: Notebook
    messages: list[Message]
    pending: str = ""

    @property
    def token_count(self) -> int:
        return count_tokens(render(self.messages)) + count_tokens(" " + self.pending.strip())

    def asked(self, question: str) -> list[Message]:
        return [*self.messages, {"role": "user", "content": self.pending + question}]


def questions(
    count: int,
    context_tokens: int,
    seed: int,
    kinds: Sequence[Kind] = ("static", "changing"),
    per_notebook: int = 6,
) -> list[Question]:
    """`count` questions, `kinds` by turns.

    The prompt made of each is at most `context_tokens` long and little shorter. Each `per_notebook` in a row
    share all that comes before the question.
    """
    rng = Random(f"{seed} {context_tokens}")
    drawn: list[Question] = []
    while len(drawn) < count:
        history = _history(rng, context_tokens)
        asked: set[str] = set()
        for _ in range(min(per_notebook, count - len(drawn))):
            kind = kinds[len(drawn) % len(kinds)]
            answered = _not_yet_asked(history.notebook, rng, kind, asked)
            drawn.append(Question(history.asked(answered.question), answered.answer, kind))
    return drawn


def _not_yet_asked(notebook: Notebook, rng: Random, kind: Kind, asked: set[str]) -> Answered:
    """A question that is not in `asked`, unless the notebook holds no other."""
    if kind == "unknown":
        answered = ask_unknown(notebook, rng)
    else:
        facts = notebook.changing if kind == "changing" else notebook.static
        keys = [key for key in facts if key.question not in asked] or list(facts)
        key = rng.choice(keys)
        answered = Answered(key.question, Fact(key, facts[key]))
    asked.add(answered.question)
    return answered


def _history(rng: Random, context_tokens: int) -> History:
    """A notebook as a system message, as the start of a user message, or spread over a chat."""
    history = History(new_notebook(rng, rng.choice((0.3, 0.4, 0.5))), [])
    shape = rng.choice(("system", "user", "chat"))
    facts_to_turn = rng.randint(5, 25)
    used = QUESTION_TOKENS
    while True:
        answered = len(history.notebook.static) + len(history.notebook.changing)
        fact = describe(history.notebook, rng, changing=answered == 1 if answered < 2 else None)
        history.pending += fact.text + " "
        used += count_tokens(" " + fact.text)
        if used + 10 > context_tokens:
            break
        facts_to_turn -= 1
        if shape == "chat" and facts_to_turn == 0 and used + 40 < context_tokens:
            answered = ask(history.notebook, rng)
            reply: Message = {"role": "assistant", "content": answered.answer}
            history.messages = [*history.asked(answered.question), reply]
            history.pending = ""
            used = QUESTION_TOKENS + history.token_count
            facts_to_turn = rng.randint(5, 25)
    if shape == "system":
        history.messages.append({"role": "system", "content": history.pending.strip()})
        history.pending = ""
    return history


def demo() -> dict[str, object]:
    """One notebook of several pages and six questions; sent are the notebook, a space and a question."""
    rng = Random(DEMO_SEED)
    notebook = new_notebook(rng, 0.45, movers=(3, 3), items=(2, 2))
    text = ""
    while count_tokens(text) + QUESTION_TOKENS < DEMO_TOKENS:
        text += " " + describe(notebook, rng).text
    asked: set[str] = set()
    kinds: tuple[Kind, ...] = ("static", "changing") * 3
    answered = [(kind, _not_yet_asked(notebook, rng, kind, asked)) for kind in kinds]
    return {
        "notebook": text.strip(),
        "questions": [{"question": a.question, "answer": a.answer, "kind": kind} for kind, a in answered],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--context-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demo", action="store_true", help="print the notebook of `tidemill demo` instead")
    arguments = parser.parse_args()
    if arguments.demo:
        print(json.dumps(demo(), indent=1))
        return
    for question in questions(arguments.count, arguments.context_tokens, arguments.seed):
        print(json.dumps(asdict(question)))


if __name__ == "__main__":
    main()
