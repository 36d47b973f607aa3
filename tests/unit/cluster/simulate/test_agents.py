"""The trace of agents has the lengths and the reuse of the study that it follows, and its hints are used."""

from itertools import pairwise
from random import Random
from statistics import median

import pytest

from tidemill.cluster.simulate.agents import FAMILIES, SYSTEM_BLOCKS, TURNS, agents_trace
from tidemill.cluster.simulate.setup import HintKind, Setup
from tidemill.cluster.simulate.trace import BLOCK_TOKENS, TraceRequest, by_client, reusable_share, speed_up
from tidemill.cluster.simulate.world import simulate


def sessions_of(requests: list[TraceRequest]) -> dict[str, list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.hints.session, []).append(request)
    return sessions


def test_lengths_and_reuse_are_those_of_the_study() -> None:
    requests = agents_trace(16, 2, Random(1))
    assert requests == sorted(requests, key=lambda request: request.at_s)
    assert median(request.prompt_tokens for request in requests) == pytest.approx(142_000, rel=0.15)
    assert median(request.answer_tokens for request in requests) == pytest.approx(444, rel=0.15)
    assert median(map(len, sessions_of(requests).values())) == pytest.approx(TURNS, rel=0.15)
    assert reusable_share(requests) > 0.94
    assert requests == agents_trace(16, 2, Random(1)) != agents_trace(16, 2, Random(2))


def test_a_turn_repeats_the_prompt_before_it_and_families_share_their_start() -> None:
    sessions = sessions_of(agents_trace(8, 2, Random(1)))
    assert len(sessions) == 16
    assert 1 < len({turns[0].blocks[:SYSTEM_BLOCKS] for turns in sessions.values()}) <= FAMILIES
    for turns in sessions.values():
        for earlier, later in pairwise(turns):
            full = earlier.prompt_tokens // BLOCK_TOKENS
            assert later.blocks[:full] == earlier.blocks[:full]
            assert later.at_s > earlier.at_s


def test_a_faster_trace_has_shorter_pauses() -> None:
    requests = agents_trace(2, 1, Random(1))
    fast = speed_up(requests, 2.0)
    assert [request.pause_s for request in fast] == [request.pause_s / 2 for request in requests]


def test_an_agent_waits_for_its_answer_before_it_asks_again() -> None:
    requests = agents_trace(2, 1, Random(1))[:12]
    outcome = simulate(requests, Setup(prefill=0, decode=0, mixed=1, hybrid=True, blocks=600))
    served = {answered.prompt_tokens: answered for answered in outcome.served}
    for chain in by_client(requests):
        for (_, earlier), (_, later) in pairwise(chain):
            before, after = served[earlier.prompt_tokens], served[later.prompt_tokens]
            assert after.at_s > before.at_s + before.ttft_s + later.pause_s


@pytest.mark.parametrize("hints", ["all", "breakpoints", "none"])
def test_a_mixed_worker_serves_agents(hints: HintKind) -> None:
    requests = agents_trace(2, 1, Random(1))[:24]
    outcome = simulate(requests, Setup(prefill=0, decode=0, mixed=1, hybrid=True, blocks=600, hints=hints))
    assert len(outcome.served) == len(requests)
