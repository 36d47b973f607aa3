"""`tidemill simulate`: a request trace through the cluster in virtual time."""
