"""What can be wrong with a model folder."""

from tidemill.kvstore.errors import TidemillError


class ModelError(TidemillError):
    """The model cannot be loaded; the message is one line that names what is wrong and what to do."""
