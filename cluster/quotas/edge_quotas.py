"""The open answers and the tokens of API keys with limits at one edge, which a router counts.

An edge sends what it has open of a key whenever that changes, and again after RENEW_S. What an edge
that was killed had open counts no more after LEASE_S.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from tidemill.cluster.quotas.router_quotas import QuotaGrant, QuotaRequest, Quotas
from tidemill.workers.messages import Overloaded

RENEW_S = 1.0

Limit = Literal["requests", "tokens"]

log = logging.getLogger(__name__)


class LimitReached(Overloaded):
    """A key has reached one of its limits a minute, `most` requests or tokens; None: of open requests."""

    def __init__(self, message: str, retry_after_s: float, limit: Limit | None, most: int) -> None:
        super().__init__(message, predicted_s=0.0, retry_after_s=retry_after_s)
        self.limit = limit
        self.most = most


class OpenAnswer:
    """One answer of a key with limits. `generated` returns its tokens so far."""

    def __init__(self, num_tokens: int) -> None:
        loop = asyncio.get_running_loop()
        self.num_tokens = num_tokens  # of its prompts
        self.generated: Callable[[], int] = lambda: 0
        self.granted: asyncio.Future[QuotaGrant | None] = loop.create_future()  # None: it may begin
        self.end_counted: asyncio.Future[None] = loop.create_future()
        self._counted = 0

    def newly_generated(self) -> int:
        before, self._counted = self._counted, self.generated()
        return self._counted - before


@dataclass(slots=True, kw_only=True)
class _Key:
    """A key of which something is open at this edge. The last of `open` may still wait for their grant."""

    name: str
    parallel_max: int | None
    tokens_per_minute: int | None
    wanted: list[OpenAnswer] = field(default_factory=list[OpenAnswer])
    open: list[OpenAnswer] = field(default_factory=list[OpenAnswer])
    ended: list[OpenAnswer] = field(default_factory=list[OpenAnswer])
    news: asyncio.Event = field(default_factory=asyncio.Event)


class EdgeQuotas:
    """The answers of this edge that keys with limits have open. `ask` asks a router and returns None when no
    router answers: then this edge counts by itself. It belongs to one asyncio loop."""

    def __init__(
        self, clock_s: Callable[[], float], ask: Callable[[QuotaRequest], Awaitable[QuotaGrant | None]]
    ) -> None:
        self._clock_s = clock_s
        self._ask_router = ask
        self._own = Quotas()
        self._keys: dict[str, _Key] = {}
        self._tasks = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def answering(
        self, name: str, num_tokens: int, parallel_max: int | None, tokens_per_minute: int | None
    ) -> AsyncGenerator[OpenAnswer]:
        """Hold one answer with prompts of `num_tokens` open within the block. Raises LimitReached. When the
        block has ended without an error, the router knows of its end."""
        key = self._keys.get(name)
        if key is None:
            key = _Key(name=name, parallel_max=parallel_max, tokens_per_minute=tokens_per_minute)
            self._keys[name] = key
            self._tasks.add(task := asyncio.create_task(self._follow(key)))
            task.add_done_callback(self._tasks.discard)
        key.parallel_max, key.tokens_per_minute = parallel_max, tokens_per_minute
        answer = OpenAnswer(num_tokens)
        key.wanted.append(answer)
        key.news.set()
        try:
            refusal = await answer.granted
            if refusal is not None:
                raise _refused(key, refusal)
            yield answer
        finally:
            if answer in key.wanted:
                key.wanted.remove(answer)
            elif answer in key.open:
                key.open.remove(answer)
                key.ended.append(answer)
                key.news.set()
        if parallel_max is not None:  # so that the client's next request finds room at any edge
            await answer.end_counted

    async def _follow(self, key: _Key) -> None:
        """Send the router a key's answers while there are any."""
        try:
            while key.wanted or key.open or key.ended:
                key.news.clear()
                await self._count(key)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RENEW_S):
                        await key.news.wait()
        except Exception as error:
            log.exception("the limits of a key cannot be counted")
            for answer in (*key.wanted, *key.open, *key.ended):
                if not answer.granted.done():
                    answer.granted.set_exception(error)
        finally:
            del self._keys[key.name]
            _count_ends(key.open + key.ended)

    async def _count(self, key: _Key) -> None:
        """Ask for the wanted answers, and report how many are open and what they have spent."""
        wanted, ended, num_open = key.wanted, key.ended, len(key.open)
        key.wanted, key.ended = [], []
        spent = sum(answer.newly_generated() for answer in (*key.open, *ended))
        key.open += wanted  # one that is given up meanwhile is reported as ended
        asked = QuotaRequest(
            name=key.name,
            open=num_open,
            wanted=tuple(answer.num_tokens for answer in wanted),
            spent=spent,
            ahead_s=self._own.rates.ahead_s(key.name, self._clock_s()),
            parallel_max=key.parallel_max,
            tokens_per_minute=key.tokens_per_minute,
        )
        try:
            grant = await self._ask_router(asked)
        finally:
            _count_ends(ended)
        if grant is None:
            grant = self._own.ask(asked, self._clock_s())
        else:
            self._own.rates.note(key.name, self._clock_s(), grant.ahead_s)
        for index, answer in enumerate(wanted):
            if index >= grant.granted and answer in key.open:
                key.open.remove(answer)
            if not answer.granted.done():
                answer.granted.set_result(None if index < grant.granted else grant)


def _count_ends(answers: Sequence[OpenAnswer]) -> None:
    for answer in answers:
        if not answer.end_counted.done():
            answer.end_counted.set_result(None)


def _refused(key: _Key, grant: QuotaGrant) -> LimitReached:
    if grant.lacking is None:
        most = key.parallel_max or 0
        return LimitReached(
            f"this key has {most} requests open, its most: ask again when one has ended",
            grant.wait_s,
            None,
            most,
        )
    most = key.tokens_per_minute or 0
    message = f"this key has used its {most} tokens of this minute: ask again in {grant.wait_s:.1f} s"
    return LimitReached(message, grant.wait_s, "tokens", most)
