"""Tidemill beside other servers on the same cores."""
