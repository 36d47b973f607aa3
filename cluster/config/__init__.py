"""The configuration file of a cluster: start at `tree.py`."""
