"""The limits of API keys: counted in a router for all edges, by an edge alone while no router answers."""
