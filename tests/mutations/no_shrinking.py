"""A pytest plugin: a planted bug has to be found, not explained, so nothing is shrunk."""

from hypothesis import Phase, settings

settings.register_profile("mutations", phases=[Phase.explicit, Phase.generate])
settings.load_profile("mutations")
