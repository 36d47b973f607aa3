"""The workers that there should be: their journal, and its changes by load, operators and nodes."""
