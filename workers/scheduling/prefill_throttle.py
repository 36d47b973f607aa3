"""Limit the prompt tokens of a step while answers stream. The average time between the tokens of a stream
stays below `SLOWDOWN_MAX` times what it is without prompts.

Each step with streams earns time for prompts, in proportion to the time of a step without prompts. A page of
a prompt is run when its time has been earned. Both times are measured, so there is nothing to tune
(docs/decisions/0013).
"""

from collections import deque
from statistics import median

SLOWDOWN_MAX = 1.8
"""The limit is below the promise of 2, as a margin for errors of measurement."""

BESIDE_STREAMS = SLOWDOWN_MAX / (SLOWDOWN_MAX - 1)
"""The factor by which a prompt takes longer while answers stream. A step lasts 1.8 times as long, and 0.8 of
it is for the prompt."""

SAMPLES = 15
"""The number of measured times of each kind that are kept. At least one step in SAMPLES carries no prompt, so
that the times are those of the streams that run now."""


class PrefillThrottle:
    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._lights_s = deque[float](maxlen=SAMPLES)  # times of steps without prompts
        self._tokens_s = deque[float](maxlen=SAMPLES)  # additional time per prompt token
        self._earned_s = 0.0
        self._since_light = 0  # steps launched since the last one without prompts
        self._last_tokens = 0  # prompt tokens of the last step that had any

    def prompt_tokens(self, most: int) -> int:
        """Return how many of `most` prompt tokens the next step with streams may carry: whole pages, or
        none."""
        if not self._lights_s or self._since_light >= SAMPLES:
            return 0  # the time of this step is not measured yet
        # A wrong time is corrected before it costs much.
        most = min(most, max(self._page_tokens, 2 * self._last_tokens))
        if not self._tokens_s:
            return min(most, self._page_tokens)
        page_s = self._page_tokens * median(self._tokens_s)
        earned_s = min(self._earned_s + self._share_s(), max(self._share_s(), page_s))
        return min(most, int(earned_s / page_s) * self._page_tokens) if page_s > 0 else most

    def launched(self, prompt_tokens: int) -> None:
        """Record that a step with streams was launched with `prompt_tokens`."""
        self._since_light = self._since_light + 1 if prompt_tokens else 0
        self._last_tokens = prompt_tokens or self._last_tokens
        if not self._lights_s or not self._tokens_s:
            return
        token_s = median(self._tokens_s)
        most_s = max(self._share_s(), self._page_tokens * token_s)
        self._earned_s = min(self._earned_s + self._share_s(), most_s) - prompt_tokens * token_s

    def landed(self, seconds: float, prompt_tokens: int) -> None:
        """Record how long that step took."""
        if not prompt_tokens:
            # When fewer streams run, the samples are obsolete.
            if self._lights_s and seconds < self._light_s() / 2:
                self._lights_s.clear()
                self._tokens_s.clear()
            self._lights_s.append(seconds)
        elif self._lights_s:
            self._tokens_s.append(max(0.0, seconds - self._light_s()) / prompt_tokens)

    def _light_s(self) -> float:
        """Return the lower quartile: a machine delays steps and never speeds them up."""
        return sorted(self._lights_s)[len(self._lights_s) // 4]

    def _share_s(self) -> float:
        """Return the time for prompts that a step earns."""
        return (SLOWDOWN_MAX - 1) * self._light_s()
