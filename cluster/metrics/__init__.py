"""Prometheus metrics: their names, the counters of edge and workers, the scrape endpoint, their
documentation."""
