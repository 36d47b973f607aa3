"""The steps of a server, by when the tokens of its requests come. Pure.

A step ends when its first token comes. The next token of a request that has one in this step belongs to the
next step. A prompt may take several steps, beside the tokens of others, so that steps are one sample until no
prompt waits or has begun:

    prompt of B   |---------------|
    tokens of A   A    A    A     A    A    A
    samples       |----|----------|----|----|

Other clients of the server make it seem slower, which it is.
"""

from collections.abc import Hashable

from tidemill.workers.messages import Speed
from tidemill.workers.transfer.speed_model import StepTimeModel

SAMPLE_S_MAX = 4.0
"""The longest sample, of a server that always has prompts. A part of them is computed before or after it."""


class StepTimes:
    """The requests of one server, and its speed."""

    def __init__(self) -> None:
        self._model = StepTimeModel()
        self._prompts: dict[Hashable, int] = {}  # of each request, in tokens; 0 when it is computed
        self._step: set[Hashable] = set()  # the requests with a token in the latest step
        self._step_s = 0.0  # its end
        self._clear(0.0)

    @property
    def speed(self) -> Speed:
        return self._model.speed

    def begin(self, request: Hashable, prompt_tokens: int, now_s: float) -> None:
        """Time a request from now on, of whose prompt `prompt_tokens` are to be computed."""
        if not self._prompts:
            self._clear(now_s)
        self._prompts[request] = prompt_tokens

    def token(self, request: Hashable, now_s: float, num_tokens: int = 1) -> None:
        """Count new tokens of a request, if it is timed. The first of them end its prompt."""
        if request not in self._prompts:
            return
        if request in self._step or not self._step:
            self._end_step()
            self._step_s = now_s
        self._step.add(request)
        if self._prompts[request]:
            self._prompt_tokens += self._prompts[request]
            self._prompts[request] = 0
        else:
            self._rows += num_tokens

    def end(self, request: Hashable) -> None:
        """Time a request no more: it has ended, or its reader pauses."""
        if self._prompts.pop(request, 0):
            self._is_exact = False  # an unknown part of its prompt was computed
        if not self._prompts:
            self._end_step()

    def _end_step(self) -> None:
        """Count the latest step, and end the sample if it can end here."""
        if not self._step:
            return
        self._step.clear()
        self._steps += 1
        seconds = self._step_s - self._from_s
        if seconds < SAMPLE_S_MAX and any(self._prompts.values()):
            return
        if self._is_exact:
            self._model.stepped(
                seconds,
                steps=self._steps,
                prompt_tokens=self._prompt_tokens,
                pairs=0,  # unknown
                rows=self._rows,
                followed=True,
            )
        self._clear(self._step_s)

    def _clear(self, from_s: float) -> None:
        self._from_s = from_s
        self._steps = self._prompt_tokens = self._rows = 0
        self._is_exact = True
