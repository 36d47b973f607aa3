"""One file per model family, the registry of architectures, and the decoder that runs them."""
