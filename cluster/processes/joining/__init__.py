"""One-time tokens, by which edges get certificates of the cluster, and the revocation of certificates."""
