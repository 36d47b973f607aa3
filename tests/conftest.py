"""Settings of the whole suite."""

from hypothesis import settings

# Equal runs on every machine, however slow: a deadline would be a speed check.
settings.register_profile("tidemill", deadline=None, derandomize=True)
settings.load_profile("tidemill")
