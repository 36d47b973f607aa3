"""The options of commands that need no configuration, and their refusals."""
