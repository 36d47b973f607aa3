"""Models: architectures, their layers, and how weights are loaded."""
