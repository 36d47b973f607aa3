"""`tidemill simulate`: a trace of requests through a cluster in virtual time."""
