"""The held-out questions that the bundled keeper is asked, and what measures its answers."""
