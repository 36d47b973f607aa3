"""The tokens that a grammar allows, as booleans."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tidemill.workers.execution.grammar import Matcher


def allowed(matcher: Matcher) -> npt.NDArray[np.bool_]:
    """Return a boolean for each bit of the next mask."""
    return np.unpackbits(matcher.mask().view(np.uint8), bitorder="little").astype(np.bool_)


def accepts(matcher: Matcher, tokens: Sequence[int]) -> bool:
    """Return whether these tokens, one after the other, are all allowed."""
    for token in tokens:
        if not allowed(matcher)[token]:
            return False
        matcher.push(token)
    return True
