"""The `usage` of a reply: tokens of prompt and answer, and the origin of the prompt's tokens."""

from collections.abc import Iterator

from tidemill.cluster.edge.cache_misses import cache_diagnostics, operator_diagnostics
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.workers.cache_lookup import CacheMiss
from tidemill.workers.messages import Trace

Json = dict[str, object]


class UsageCounter:
    """Counts the tokens of a request for its usage. A prompt with several answers counts once."""

    def __init__(self, job: PreparedRequest) -> None:
        self._job = job
        self._traces: dict[int, Trace] = {}
        self.num_generated = 0

    def record(self, increment: Increment) -> None:
        self.num_generated += increment.growth.num_tokens
        self._traces.setdefault(increment.choice, increment.trace)

    def cached_tokens(self) -> int:
        """Return how many tokens of the prompts no worker computed."""
        return sum(
            trace.cached_tokens(len(self._job.requests[index].tokens)) for index, trace in self._of_prompts()
        )

    def num_prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self._job.requests[:: self._job.n])

    def usage(self, *, diagnoses: bool = True) -> Json:
        """Return OpenAI's usage, and the origin of the prompt's tokens. If it `diagnoses` and the client asks
        for it, the reasons for computing tokens are added.

        The prefill worker computed prefilled_tokens and the decode worker replayed_tokens for this request;
        the decode worker fetched fetched_tokens from the store and already had reused_tokens.
        """
        prompt_tokens = self.num_prompt_tokens()
        traces = [trace for _, trace in self._of_prompts()]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.num_generated,
            "total_tokens": prompt_tokens + self.num_generated,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens(),
                "prefilled_tokens": sum(trace.prefilled.computed_tokens for trace in traces),
                "fetched_tokens": sum(trace.provenance.fetched_tokens for trace in traces),
                "replayed_tokens": sum(trace.provenance.computed_tokens for trace in traces),
                "reused_tokens": sum(trace.provenance.reused_tokens for trace in traces),
                **(self.diagnostics() if diagnoses else {}),
            },
        }

    def diagnostics(self) -> Json:
        """Return why tokens of each prompt were computed, for a client that asks for it."""
        if not self._job.requests or not self._job.requests[0].cache_diagnostics:
            return {}
        show, requests = self._job.show, self._job.requests
        found = [cache_diagnostics(trace, requests[index], show) for index, trace in self._of_prompts()]
        return {"cache_diagnostics": found}

    def operator_diagnostics(self) -> list[Json]:
        """Return why tokens of each prompt were computed, with names and without text."""
        return [operator_diagnostics(trace, self._job.requests[index]) for index, trace in self._of_prompts()]

    def misses(self) -> list[CacheMiss]:
        """Return the misses of all prompts."""
        return [miss for _, trace in self._of_prompts() for miss in trace.misses]

    def _of_prompts(self) -> Iterator[tuple[int, Trace]]:
        """Yield the first request of each prompt, by its index, with its trace."""
        for index in range(0, len(self._job.requests), self._job.n):
            if index in self._traces:
                yield index, self._traces[index]
