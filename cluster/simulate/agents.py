"""A trace of agents: long sessions whose turns wait for a tool or for a person.

    agent 0   |turn|--tool--|turn|-tool-|turn|---------person---------|turn| ...  |next session|
    agent 1      |turn|-tool-|turn|-----tool-----|turn| ...

The lengths follow a published study of coding agents: 43 turns a session, prompts of 142K tokens and answers
of 444 in the median, and 96 % of the prompt tokens seen before. A turn repeats the prompt before it and adds
its answer and the text of a tool or a person. Pauses are log-normal, one law for each, so that their mixture
has a long tail.
"""

from random import Random

from tidemill.cluster.simulate.trace import BLOCK_TOKENS, Hints, TraceRequest

TURNS = 43
SYSTEM_BLOCKS = 32
"""The system prompt and the tools, 16K tokens, which all sessions of a family share."""

FAMILIES = 4
ADDED_TOKENS = 4_300
"""The median growth of a prompt by one turn, its answer included."""

ANSWER_TOKENS = 444
ADDED_SIGMA = 0.8
ANSWER_SIGMA = 0.7
TURNS_SIGMA = 0.25

PERSON_SHARE = 0.1
TOOL_S, TOOL_SIGMA = 4.0, 1.2
PERSON_S, PERSON_SIGMA = 180.0, 1.0
"""The median and the spread of a pause for a tool and for a person."""

TOKEN_S = 0.02
"""The time of an answer token, by which the next turn comes later."""

RETAIN_S = 300.0
"""The time for which an agent that waits for a tool has its prompt retained."""


def agents_trace(agents: int, sessions: int, rng: Random) -> list[TraceRequest]:
    """Return the requests of `agents` that have `sessions` one after the other, sorted by arrival."""
    names = iter(range(1 << 62))
    systems = [[next(names) for _ in range(SYSTEM_BLOCKS)] for _ in range(FAMILIES)]
    requests: list[TraceRequest] = []
    for agent in range(agents):
        at_s = rng.random() * TURNS * PERSON_S * PERSON_SHARE
        pause_s = 0.0
        for session in range(sessions):
            blocks, tokens = list(rng.choice(systems)), SYSTEM_BLOCKS * BLOCK_TOKENS
            for _ in range(max(1, round(_log_normal(rng, TURNS, TURNS_SIGMA)))):
                answer = max(1, round(_log_normal(rng, ANSWER_TOKENS, ANSWER_SIGMA)))
                tokens += answer + round(_log_normal(rng, ADDED_TOKENS - ANSWER_TOKENS, ADDED_SIGMA))
                blocks.extend(next(names) for _ in range(-(-tokens // BLOCK_TOKENS) - len(blocks)))
                asks_person = rng.random() < PERSON_SHARE
                requests.append(
                    TraceRequest(
                        at_s,
                        tokens,
                        answer,
                        tuple(blocks),
                        Hints(
                            breakpoints=(SYSTEM_BLOCKS * BLOCK_TOKENS,),
                            session=f"{agent}/{session}",
                            retain_s=0.0 if asks_person else RETAIN_S,
                        ),
                        client=str(agent),
                        pause_s=pause_s,
                    )
                )
                median_s, sigma = (PERSON_S, PERSON_SIGMA) if asks_person else (TOOL_S, TOOL_SIGMA)
                pause_s = _log_normal(rng, median_s, sigma)
                at_s += answer * TOKEN_S + pause_s
                if tokens % BLOCK_TOKENS:
                    blocks.pop()  # the next turn continues inside of it
    return sorted(requests, key=lambda request: request.at_s)


def _log_normal(rng: Random, median: float, sigma: float) -> float:
    return median * rng.lognormvariate(0.0, sigma)
