"""Answers of the engine in one process, which those of every cluster equal."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from tests.support.e2e.streams import Body, Outcome
from tidemill import LLM, SamplingParams

Alone = Callable[[list[Body]], list[Outcome]]
FIELDS = ("max_tokens", "temperature", "seed", "ignore_eos")


@contextmanager
def keeper_alone() -> Generator[Alone]:
    with LLM("keeper", memory="64MiB") as llm:

        def outcomes(asked: list[Body]) -> list[Outcome]:
            params = [SamplingParams(**{field: body[field] for field in FIELDS}) for body in asked]
            found = llm.generate([body["prompt"] for body in asked], params)
            answers = [output.outputs[0] for output in found]
            return [(answer.text, answer.finish_reason, len(answer.token_ids)) for answer in answers]

        yield outcomes
