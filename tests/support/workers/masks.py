"""The tokens that a grammar allows, as booleans."""

import numpy as np
import numpy.typing as npt

from tidemill.workers.execution.grammar import Matcher


def allowed(matcher: Matcher) -> npt.NDArray[np.bool_]:
    """Return a boolean for each bit of the next mask."""
    return np.unpackbits(matcher.mask().view(np.uint8), bitorder="little").astype(np.bool_)
