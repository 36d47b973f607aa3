"""Everything that starts, scales and stops processes; the only folder besides `server` that imports Ray."""
