"""Bugs to plant where logprobs of prompts are computed, delivered and told."""

from tests.mutations.planted import FLOW, PLACEMENT, UNIT, Planted

SCORES = f"{UNIT}/workers/engine/test_prompt_logprobs.py"
ECHO = f"{UNIT}/cluster/edge/requests/test_echo.py"

SCORING = (
    Planted(
        "what logprobs of a prompt are read from is restored",
        "workers/scheduling/sequence.py",
        "min(self.boundary, self.scored) if self.scored < self.request.to_score else self.boundary",
        "self.boundary",
        SCORES,
    ),
    Planted(
        "logprobs of a prompt are delivered again after a preemption",
        "workers/scheduling/sequence.py",
        "first, last = max(start, self.scored), min",
        "first, last = start, min",
        SCORES,
    ),
    Planted(
        "logprobs that were delivered are asked of the next step",
        "workers/engine/commit.py",
        "            sequence.scored += len(some)\n",
        "",
        SCORES,
    ),
    Planted(
        "tokens that were drawn before a loss count as the prompt's",
        "workers/messages.py",
        "len(self.tokens) - self.drawn - 1",
        "len(self.tokens) - 1",
        SCORES,
    ),
    Planted(
        "a row's tokens are scored from its first one on",
        "workers/execution/logprobs.py",
        "begin + offset + start",
        "begin + start",
        SCORES,
    ),
    Planted(
        "rows that are not scored are not counted",
        "workers/execution/logprobs.py",
        "        begin += len(row.tokens)\n",
        "        begin += len(row.tokens) if row.scores else 0\n",
        SCORES,
    ),
    Planted(
        "ranks score from the first token of a row on",
        "workers/parallel/frames.py",
        "(row.scores.offset, len(row.scores.targets))",
        "(0, len(row.scores.targets))",
        f"{UNIT}/workers/parallel/test_frames.py",
    ),
    Planted(
        "logprobs of a prompt that came before a loss come again",
        "cluster/edge/flow.py",
        "        self.scored += len(delta.prompt_logprobs)\n",
        "",
        FLOW,
    ),
    Planted(
        "a prompt whose logprobs are wanted is placed as any other",
        "cluster/edge/flow.py",
        "whole = rest.scored < rest.to_score",
        "whole = False",
        FLOW,
    ),
    Planted(
        "a prompt that is wanted whole is computed elsewhere first",
        "cluster/router/placement.py",
        " and not ask.recompute_all",
        "",
        PLACEMENT,
    ),
    Planted(
        "the places of an answer do not move behind its echo",
        "cluster/edge/requests/echo.py",
        "start=len(prompt.text) + one.start",
        "start=one.start",
        ECHO,
    ),
    Planted(
        "the stop token behind an echo is not told",
        "cluster/edge/chat/output/detokenizer.py",
        " and self._ending.scores_stop:",
        " and False:",
        ECHO,
    ),
    Planted(
        "the worst of the answers is told",
        "cluster/edge/http/replies.py",
        "key=per_token, reverse=True",
        "key=per_token",
        ECHO,
    ),
    Planted(
        "a response opens with what it has already said",
        "cluster/edge/http/responses.py",
        "opening = [] if sent else self._opening()  # before anything is in it\n",
        "opening = list[Json]()\n",
        f"{UNIT}/cluster/edge/http/test_responses.py",
    ),
)
