"""The error of a model folder."""

from tidemill.kvstore.errors import TidemillError


class ModelError(TidemillError):
    """The model cannot be loaded. The message is one line with the cause and the fix."""
