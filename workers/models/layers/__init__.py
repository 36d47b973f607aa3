"""The parts of a decoder layer: attention and other mixers, MLPs, rotary embeddings."""
