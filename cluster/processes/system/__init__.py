"""Processes and folders of the operating system, and their ends."""
