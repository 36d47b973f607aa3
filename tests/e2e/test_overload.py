"""A flood of ten times what the fleet can do: it does as much as before, and refuses the rest at once.

FLOOD_S=60 pytest tests/e2e/test_overload.py -s measures: a flood of a minute, goodput within a tenth of its
peak.
"""

import asyncio
import os
import sys
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from tests.e2e.load import Client, Outcome, PacedServer, at_rate, paced_server
from tests.e2e.paced import answer
from tidemill.workers.api.tokenizer import load_tokenizer
from tidemill.workers.models.bundled import bundled

TOKENS_PER_S = 320  # of each of two workers
PROMPT_TOKENS = 64
CAPACITY = 2 * TOKENS_PER_S / PROMPT_TOKENS  # requests in a second
NEW_TOKENS = 4
DEADLINE = {"x-slo-ttft-ms": "3000"}
GROWTH_MIB_MAX = 64
FLOOD_S = float(os.environ.get("FLOOD_S", "10"))
GOODPUT_MIN = 0.9 if "FLOOD_S" in os.environ else 0.2  # of the peak; otherwise others use the machine, too
FILL_S = 3.0
"""Until the queue is as long as the deadline allows."""


@pytest.fixture(scope="module")
def server() -> Generator[PacedServer]:
    with paced_server({"mixed-0": "mixed", "mixed-1": "mixed"}, TOKENS_PER_S, 32) as server:
        yield server


def prompt(number: int) -> list[int]:
    """One that nobody else has: nothing of it is held anywhere."""
    return [100 + number % 700, 100 + number // 700, *[100 + index for index in range(PROMPT_TOKENS - 2)]]


def body(number: int) -> dict[str, Any]:
    return {"prompt": prompt(number), "max_tokens": NEW_TOKENS, "stream": True, "ignore_eos": True}


def check(outcomes: Sequence[Outcome], start: int = 0) -> None:
    """Every answer is exact, or was refused in whole with a time to come back."""
    tokenizer = load_tokenizer(bundled()["keeper"])
    for outcome in outcomes:
        if outcome.status == 429:
            assert int(outcome.retry_after) >= 1
            continue
        assert outcome.status == 200
        decoder = tokenizer.decoder()
        tokens = tuple(prompt(start + outcome.number))
        expected = "".join(decoder.push(answer(tokens, index)) for index in range(NEW_TOKENS))
        assert outcome.text == expected


def goodput(outcomes: Sequence[Outcome], since_s: float, until_s: float) -> float:
    """Answers in a second that ended between the two times."""
    done = [one for one in outcomes if one.status == 200 and since_s <= one.ended_s < until_s]
    return len(done) / (until_s - since_s)


def test_a_flood_changes_nothing_for_those_that_are_taken(server: PacedServer) -> None:
    async def main() -> None:
        async with Client(server.url) as client:
            await flood_of(client, server)

    asyncio.run(main())


async def flood_of(client: Client, server: PacedServer) -> None:
    check([await client.call(0, body(0), {})])
    peak_s = max(6.0, FLOOD_S / 3)
    full = await at_rate(client, 1.5 * CAPACITY, peak_s, body, DEADLINE)
    check(full)
    began_s = full[0].sent_s
    peak = goodput(full, began_s + FILL_S, began_s + peak_s)
    before = server.memory_bytes()

    flooding = asyncio.create_task(
        at_rate(client, 10 * CAPACITY, FLOOD_S, lambda number: body(1000 + number), DEADLINE)
    )
    await asyncio.sleep(FILL_S)  # the queue is full then, which is the case that is of interest
    calm = await at_rate(
        client,
        1,
        FLOOD_S - FILL_S - 1,
        lambda number: body(9000 + number),
        {**DEADLINE, "authorization": "Bearer calm"},
    )
    flood = await flooding
    check(flood, 1000)
    check(calm, 9000)
    after = server.memory_bytes()

    began_s = flood[0].sent_s
    under_flood = goodput([*flood, *calm], began_s + FILL_S, began_s + FLOOD_S)
    refused = sum(one.status == 429 for one in flood)
    waits = sorted(one.first_s - one.sent_s for one in flood if one.status == 200 and one.first_s)
    grown = {name: (after[name] - before[name]) >> 20 for name in after}
    sizes = {name: (before[name] >> 20, after[name] >> 20) for name in after}
    figures = (
        f"peak {peak:.1f}/s, under a flood {under_flood:.1f}/s, {refused} of {len(flood)} refused, first "
        f"tokens after {waits[len(waits) // 2]:.2f} s, the last after {waits[-1]:.2f} s, {len(calm)} of "
        f"another tenant answered; MiB before and after: {sizes}"
    )
    assert refused > len(flood) / 2, figures
    assert under_flood > GOODPUT_MIN * peak, figures
    assert {one.status for one in calm} == {200}, "another tenant's queue is not theirs"
    assert max(grown.values()) < GROWTH_MIB_MAX, figures
    sys.stdout.write(f"{figures}\n")
