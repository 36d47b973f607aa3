"""Make sequences from requests. Requests that cannot be served are refused here, before they take memory."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.layout import Layout, restorable_end
from tidemill.workers.execution.grammar import Grammars, Matcher
from tidemill.workers.execution.ngram_drafter import Drafter, HeadDrafter, NgramDrafter
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.messages import TRIAL_TOKENS, Request, RequestError
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.sequence import PRIORITY_AGE_S, Delivery, Isolation, Restore, Sequence


class RequestIntake:
    def __init__(
        self,
        limits: EngineLimits,
        layout: Layout,
        root_of: Callable[[str], PageKey],
        grammars: Grammars | None,
        on_ready: Callable[[], None],
    ) -> None:
        """Create an intake. `on_ready` is called when a row that sat out for its mask can run."""
        self._on_ready = on_ready
        self._limits = limits
        self._layout = layout
        self._root_of = root_of
        self._grammars = grammars
        self._count = 0

    def producing(self, request: Request) -> Sequence:
        """Return a sequence that computes all pages of its prompt except the last. Raises RequestError."""
        self._check(request)
        return self._sequence(request, None, produces=True)

    async def generating(self, request: Request) -> Sequence:
        """Return a sequence that answers. Raises RequestError."""
        self._check(request)
        matcher = None
        if request.sampling.grammar is not None:
            if self._grammars is None:
                raise RequestError(
                    "this worker has no tokenizer to follow a grammar", param="response_format"
                )
            matcher = await self._grammars.matcher_soon(request.sampling.grammar)
            matcher.on_ready = partial(_call_soon, asyncio.get_running_loop(), self._on_ready)
        return self._sequence(request, matcher, produces=False)

    def _check(self, request: Request) -> None:
        total, vocabulary = len(request.tokens) + request.max_new_tokens, self._limits.vocab_size
        if not request.tokens or (request.max_new_tokens < 1 and not request.pools):
            raise RequestError("a request needs at least one prompt token and one new token", param="prompt")
        if request.pools != self._limits.pools:
            is_for = "embeddings and scores" if self._limits.pools else "answers"
            raise RequestError(f"this worker's model is for {is_for} alone", param="model")
        if (last := max(request.tokens)) >= vocabulary:
            raise RequestError(f"token {last} is not one of the {vocabulary} of this model", param="prompt")
        if max(request.sampling.logprobs or 0, request.sampling.prompt_logprobs or 0) > vocabulary:
            raise RequestError(f"there are {vocabulary} tokens to report logprobs of", param="logprobs")
        if total > self._limits.capacity_tokens:
            raise RequestError(
                f"{total} tokens do not fit this worker, which holds {self._limits.capacity_tokens}: "
                "shorten the prompt, lower max_tokens, or give the workers more --memory",
                code="context_length_exceeded",
            )

    def _sequence(self, request: Request, matcher: Matcher | None, *, produces: bool) -> Sequence:
        self._count += 1
        size, num_tokens = self._layout.page_tokens, len(request.tokens)
        target = restorable_end(num_tokens, size) if produces else num_tokens
        root = self._root_of(request.salt)
        now_s = asyncio.get_running_loop().time()
        return Sequence(
            id=f"{request.request_id}#{self._count}",
            seniority=(now_s + request.priority * PRIORITY_AGE_S + request.queue_offset_s, self._count),
            request=request,
            root=root,
            page_tokens=size,
            produces=produces,
            tokens=list(request.tokens),
            target=target,
            sampling_state=SamplingState(request, matcher),
            drafter=None if produces else self._drafter(),
            keys=page_keys(root, request.tokens, size),
            delivery=Delivery(scored=request.scored),
            restore=Restore(junctions=_junctions(request, self._layout)),
            isolation=Isolation(until=_isolated_end(request, target, produces=produces)),
        )

    def _drafter(self) -> Drafter | None:
        if not self._limits.drafts_max:
            return None
        return HeadDrafter() if self._limits.mtp else NgramDrafter()


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)


def _junctions(request: Request, layout: Layout) -> set[int]:
    """Return the page boundaries at or before the breakpoints of a request, where checkpoints are kept."""
    if not layout.hybrid:
        return set()
    size, end = layout.page_tokens, restorable_end(len(request.tokens), layout.page_tokens)
    return {depth // size * size for depth in request.breakpoints if size <= depth <= end}


def _isolated_end(request: Request, target: int, *, produces: bool) -> int:
    """Return the depth up to which a request that may have crashed a worker runs alone."""
    if not request.on_trial:
        return 0
    if produces or request.pools:
        return target
    return target - 1 + min(TRIAL_TOKENS, request.max_new_tokens)
