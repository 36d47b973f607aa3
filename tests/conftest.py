"""Settings of the whole suite."""

import signal

from hypothesis import settings

# A shell starts what it runs in the background deaf to Ctrl-C, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Equal runs on every machine, however slow: a deadline would be a speed check.
settings.register_profile("tidemill", deadline=None, derandomize=True)
settings.load_profile("tidemill")
