"""Prometheus metrics: their names, what edge and workers count, the scrape endpoint, their documentation."""
