"""Clients of the simulated cluster: conversations, with each answer checked token by token."""

import asyncio
from contextlib import aclosing
from functools import partial
from random import Random

from tests.support.sim.fold import expected, expected_scores
from tests.support.sim.world import World
from tidemill.cluster.edge.flow import serve
from tidemill.workers.inbox import generated
from tidemill.workers.messages import EngineInfo, Poisonous, Request, Sampling, TokenLogprob, Unserved

SCORED = 5
"""One in this many conversations has a turn with logprobs of its prompt."""


async def converse(world: World, rng: Random, index: int, shared: list[int], longest: int) -> bool:
    """Run a conversation, where each turn repeats the one before with its answer. Return whether all turns
    were served."""
    tokens = list(shared)
    for turn in range(rng.choice([1, 1, 2, 3])):
        await asyncio.sleep(rng.random() * rng.choice([0, 1, 10]))
        tokens += [rng.randrange(world.settings.vocabulary) for _ in range(rng.randrange(1, 9))]
        left = longest - len(tokens)
        if left < 1:
            return True
        request = Request(
            request_id=f"r{index}-{turn}",
            tokens=tuple(tokens),
            max_new_tokens=rng.randrange(1, min(30, left) + 1),
            sampling=Sampling(seed=rng.randrange(3), prompt_logprobs=1 if index % SCORED == turn else None),
            stop_token_ids=(2 + rng.randrange(6),) if rng.random() < 0.5 else (),
            priority=rng.choice([0, 0, 0, 1, -3]),
            breakpoints=(len(shared), len(tokens)) if index % 2 else (),
        )
        try:
            answer = await ask(world, request, patience=rng.choice([1, 5, 1000, 1000, 1000]))
        except (Unserved, Poisonous):
            return False
        if answer is None:
            return True
        tokens += answer
    return True


async def ask(world: World, request: Request, patience: int) -> list[int] | None:
    """Return the checked answer, or None when the client disconnects after `patience` tokens.

    Raises Unserved and Poisonous.
    """
    want = expected(
        request,
        hybrid=world.layout.has_states,
        vocabulary=world.settings.vocabulary,
        window=world.layout.window_tokens,
    )
    got: list[int] = []
    scores: list[TokenLogprob] = []
    finish = None
    try:
        info = EngineInfo(page_tokens=world.layout.page_tokens)
        answer = partial(serve, request, world, world, world.root_of, info)
        async with aclosing(generated(answer)) as pieces:
            async for piece in pieces:
                assert finish is None, "a stream continues after its finish"
                assert not (got and piece.prompt_logprobs), "the prompt comes first"
                got += piece.tokens
                scores += piece.prompt_logprobs
                if got:
                    assert scores == expected_scores(
                        request, hybrid=world.layout.has_states, window=world.layout.window_tokens
                    )
                finish = piece.finish
                if len(got) >= patience:
                    break
    except (Unserved, Poisonous):
        assert got == want[: len(got)]
        raise
    if len(got) >= patience:
        assert got == want[: len(got)]
        return None
    assert got == want
    assert finish == ("stop" if want[-1] in request.stop_token_ids else "length")
    return got
