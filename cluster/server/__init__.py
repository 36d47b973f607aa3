"""The process of `tidemill serve`: it starts and stops the cluster and the endpoint together."""
