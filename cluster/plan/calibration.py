"""The step times of a model on this machine, fitted to a few requests to a server of one worker.

    first token of a prompt alone   request_s + steps * step_s + tokens * token_s + pairs * pair_s
    between tokens of n streams     step_s + n * row_s
    first token beside n streams    busy_s more, and the steps in flight

These are times as a client sees them, so they include the engine's loop, the edge and the connection.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Speed

Vector = npt.NDArray[np.float64]


class CalibrationError(TidemillError):
    """A file is not a calibration, or one of another model, or requests were not answered."""


class PromptTime(NamedTuple):
    """The time to the first token of a prompt alone."""

    num_tokens: int
    seconds: float


class StreamTime(NamedTuple):
    """The time between tokens of `rows` streams."""

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The speed of a worker with `threads` on the machine that measured it. `load` is the load average of the
    machine meanwhile, and `context_tokens` the length of its streams. A request takes `request_s` outside of
    steps, and `busy_s` more while others are answered, which share the cores of edges and clients."""

    model: str
    threads: int
    speed: Speed
    request_s: float
    busy_s: float
    context_tokens: int
    load: float


def fit(
    prompts: Sequence[PromptTime], streams: Sequence[StreamTime], step_tokens: int
) -> tuple[Speed, float]:
    """Return the speed and the time of a request outside of steps. A worker measures its own fetches only
    while it serves, so the rate of the store is not part of it."""
    step_s, row_s = _positive(
        np.array([(1.0, time.rows) for time in streams]), np.array([time.seconds for time in streams])
    )
    steps = np.array([-(-time.num_tokens // step_tokens) for time in prompts])
    terms = [(1.0, time.num_tokens, time.num_tokens**2 / 2) for time in prompts]
    rest_s = np.array([time.seconds for time in prompts]) - steps * step_s
    request_s, token_s, pair_s = _positive(np.array(terms), np.maximum(rest_s, 1e-6))
    return Speed(step_s=step_s, token_s=token_s, pair_s=pair_s, row_s=row_s), request_s


def busy_s(
    beside_s: float, num_tokens: int, rows: int, alone: tuple[Speed, float], step_tokens: int
) -> float:
    """Return the time that a prompt takes beside `rows` streams in addition to its steps and theirs, which
    are half of the running step and all of the launched one. `alone` is what `fit` has found."""
    speed, request_s = alone
    waits_s = 1.5 * (speed.step_s + rows * speed.row_s)
    steps = -(-num_tokens // step_tokens)
    own_s = speed.prefill_s(0, num_tokens, step_tokens) + steps * rows * speed.row_s
    return max(0.0, beside_s - request_s - waits_s - own_s)


def _positive(terms: Vector, seconds: Vector) -> list[float]:
    """Return the coefficients of `terms` [N, T], none below 0, whose sums are nearest to `seconds` [N] by
    relative errors."""
    count = terms.shape[1]
    scaled = terms / seconds[:, None]
    best: tuple[float, Vector] | None = None
    for chosen in chain.from_iterable(combinations(range(count), size) for size in range(1, count + 1)):
        fitted = np.zeros(count)
        fitted[list(chosen)] = np.linalg.lstsq(scaled[:, chosen], np.ones(len(seconds)), rcond=None)[0]
        error = float(((scaled @ fitted - 1) ** 2).sum())
        if (fitted >= 0).all() and (best is None or error < best[0] - 1e-9):
            best = error, fitted
    assert best is not None, "a single positive term always fits"
    return best[1].tolist()


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Raises CalibrationError."""
    try:
        path.write_text(json.dumps(asdict(calibration), indent=2) + "\n")
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written: {error.strerror}") from error


def read_calibration(path: Path, model: str, threads: int) -> Calibration:
    """Read the calibration of this model with these threads. Raises CalibrationError."""
    try:
        content: object = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path} is not a calibration: {error}") from error
    given = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    speed = cast("dict[str, float]", given.get("speed")) if isinstance(given.get("speed"), dict) else {}
    names = {field.name for field in fields(Calibration)}
    if set(given) != names or set(speed) != {field.name for field in fields(Speed)}:
        raise CalibrationError(f"{path} is not a calibration: give another name, and it will be measured")
    given["speed"] = Speed(**speed)
    found = Calibration(**given)
    if (found.model, found.threads) != (model, threads):
        raise CalibrationError(
            f"{path} is of {found.model} with {found.threads} threads, not of {model} with {threads}: "
            "give another name, and it will be measured"
        )
    return found
