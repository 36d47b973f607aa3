"""Rows whose draws need the most memory, for the warm-up of a runner."""

from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import Row
from tidemill.workers.messages import Request, Sampling

FILTERED = Sampling(temperature=1.0, top_k=1000, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=0)


def filtered_rows(count: int) -> tuple[Row, ...]:
    """Return rows of one token that draw with every filter and a penalty."""
    request = Request(request_id="warm-up", tokens=(0,), max_new_tokens=1, sampling=FILTERED)
    return tuple(
        Row(str(index), (0,), 0, (), None, (), sampling_state=SamplingState(request))
        for index in range(count)
    )
