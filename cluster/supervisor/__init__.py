"""The code that starts, scales and stops processes; only it and `server` import Ray."""
