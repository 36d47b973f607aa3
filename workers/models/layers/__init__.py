"""What a decoder layer consists of: attention and its kin, MLPs, rotary embeddings."""
