"""Architectures, their layers, and the loading of weights."""
