"""One `tidemill serve`: the cluster and its endpoint, started and stopped together."""
