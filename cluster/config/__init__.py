"""The configuration file and the flags that override it."""
