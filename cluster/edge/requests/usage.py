"""The `usage` of a reply: tokens of prompt and answer, and the origin of the prompt's tokens."""

from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.intake import PreparedRequest
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
        prompts = range(0, len(self._job.requests), self._job.n)
        return sum(
            self._traces[index].cached_tokens(len(self._job.requests[index].tokens))
            for index in prompts
            if index in self._traces
        )

    def num_prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self._job.requests[:: self._job.n])

    def usage(self) -> Json:
        """Return OpenAI's usage, and the origin of the prompt's tokens.

        The prefill worker computed prefilled_tokens and the decode worker replayed_tokens for this request;
        the decode worker fetched fetched_tokens from the store and already had reused_tokens.
        """
        prompts = range(0, len(self._job.requests), self._job.n)
        prompt_tokens = self.num_prompt_tokens()
        traces = [self._traces[index] for index in prompts if index in self._traces]
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
            },
        }
