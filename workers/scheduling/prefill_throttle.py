"""How many prompt tokens a step may carry while answers stream: so many that the time between the tokens of
a stream stays, on average, below `SLOWDOWN_MAX` times what it is when no prompt runs beside it.

Each step beside a stream earns time for prompts, in proportion to what a step without prompts takes; a page
of a prompt is run when its time has been earned. Both times are measured on the way: nothing to tune
(docs/decisions/0013).
"""

from collections import deque
from statistics import median

SLOWDOWN_MAX = 1.8
"""Below the promise of 2, for what the measured times are wrong by."""

BESIDE_STREAMS = SLOWDOWN_MAX / (SLOWDOWN_MAX - 1)
"""How much longer a prompt takes where answers stream: of steps that may last 1.8 times as long for its sake
the 0.8 are the prompt's."""

SAMPLES = 15
"""So many times of either kind are kept. As often at least, a step carries no prompt, so that the times are
those of the streams that run now."""


class PrefillThrottle:
    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._lights_s = deque[float](maxlen=SAMPLES)  # steps that carried no prompt
        self._tokens_s = deque[float](maxlen=SAMPLES)  # of a prompt token, on top of that
        self._earned_s = 0.0
        self._since_light = 0  # steps launched
        self._last_tokens = 0  # of the last step that carried any

    def prompt_tokens(self, most: int) -> int:
        """At most so many in the next step, in which streams run: whole pages, or none."""
        if not self._lights_s or self._since_light >= SAMPLES:
            return 0  # its time will tell
        most = min(
            most, max(self._page_tokens, 2 * self._last_tokens)
        )  # a wrong time is seen before it costs
        if not self._tokens_s:
            return min(most, self._page_tokens)
        page_s = self._page_tokens * median(self._tokens_s)
        earned_s = min(self._earned_s + self._share_s(), max(self._share_s(), page_s))
        return min(most, int(earned_s / page_s) * self._page_tokens) if page_s > 0 else most

    def launched(self, prompt_tokens: int) -> None:
        """A step in which streams run has so many prompt tokens."""
        self._since_light = self._since_light + 1 if prompt_tokens else 0
        self._last_tokens = prompt_tokens or self._last_tokens
        if not self._lights_s or not self._tokens_s:
            return
        token_s = median(self._tokens_s)
        most_s = max(self._share_s(), self._page_tokens * token_s)
        self._earned_s = min(self._earned_s + self._share_s(), most_s) - prompt_tokens * token_s

    def landed(self, seconds: float, prompt_tokens: int) -> None:
        """It took so long."""
        if not prompt_tokens:
            if self._lights_s and seconds < self._light_s() / 2:  # fewer streams: what was measured is over
                self._lights_s.clear()
                self._tokens_s.clear()
            self._lights_s.append(seconds)
        elif self._lights_s:
            self._tokens_s.append(max(0.0, seconds - self._light_s()) / prompt_tokens)

    def _light_s(self) -> float:
        """The lower quartile: the machine holds a step up, it never hurries one."""
        return sorted(self._lights_s)[len(self._lights_s) // 4]

    def _share_s(self) -> float:
        """What a step earns."""
        return (SLOWDOWN_MAX - 1) * self._light_s()
