"""Limit the prompt tokens of a step while answers stream, so that the step keeps a target for its time.

    target   |------------------------------------------------|
    step     |-- rows that decode --|------ prompt tokens -----|

The target is the largest inter-token latency (ITL) of streams beside prompts. Both parts of a step are
measured, so the target is all that there is to set (decision 13).
"""

from collections import deque
from statistics import median

import numpy as np
import numpy.typing as npt

LIGHT_STEPS = 2
"""The target is at least this many times a step without prompts: prompts have half of the time or more."""

START_PAGES = 4
"""The prompt tokens of the first step, in pages, while the time of a prompt token is unknown."""

Number = npt.NDArray[np.float64] | float

SAMPLES = 15
"""The number of measured times of each kind that are kept. At least one step in SAMPLES carries no prompt, so
that the times are those of the streams that run now."""


def prompt_slowdown(
    light_s: Number,
    target_s: Number,
    *,
    step_s: Number,
    token_s: Number,
    page_tokens: Number,
    tokens_max: Number,
) -> Number:
    """Return how many times longer a prompt takes beside streams, where a step without prompts takes
    `light_s`; `target_s` 0 limits no prompt, and `token_s` 0 is not known.

    `step_s` and `token_s` are the time of a step and of each prompt token in it, of which there
    are at least `page_tokens` and at most `tokens_max`.
    """
    room_s = np.where(np.greater(target_s, 0), np.maximum(target_s - light_s, light_s), np.inf)
    known_s = np.where(np.greater(token_s, 0), token_s, 1.0)
    num_tokens = np.clip(room_s / known_s, page_tokens, np.maximum(page_tokens, tokens_max))
    slowdown = (light_s / num_tokens + known_s) / (step_s / tokens_max + known_s)
    return np.where(np.greater(token_s, 0), slowdown, 1.0)


class PrefillThrottle:
    def __init__(self, page_tokens: int, target_s: float) -> None:
        """Create a throttle; `target_s` 0 limits nothing."""
        self._page_tokens = page_tokens
        self._target_s = target_s
        self._lights_s = deque[float](maxlen=SAMPLES)  # times of steps without prompts
        self._tokens_s = deque[float](maxlen=SAMPLES)  # additional time per prompt token
        self._since_light = 0  # steps launched since the last one without prompts
        self._last_tokens = 0  # prompt tokens of the last step that had any

    def prompt_tokens(self, most: int) -> int:
        """Return how many of `most` prompt tokens the next step with streams may carry: whole pages, at least
        one, except in steps that measure the time without prompts."""
        if not self._target_s:
            return most
        if not self._lights_s or self._since_light >= SAMPLES:
            return 0
        # A wrong time is corrected before it costs much.
        most = min(most, max(START_PAGES * self._page_tokens, 2 * self._last_tokens))
        token_s = median(self._tokens_s) if self._tokens_s else 0.0
        if token_s <= 0:
            return most
        light_s = self._light_s()
        limit_s = max(self._target_s, LIGHT_STEPS * light_s)
        pages = int((limit_s - light_s) / (token_s * self._page_tokens))
        return min(most, max(1, pages) * self._page_tokens)

    def launched(self, prompt_tokens: int) -> None:
        """Record that a step with streams was launched with `prompt_tokens`."""
        self._since_light = self._since_light + 1 if prompt_tokens else 0
        self._last_tokens = prompt_tokens or self._last_tokens

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
