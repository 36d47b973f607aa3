"""The data that an edge keeps in a database for its clients."""
