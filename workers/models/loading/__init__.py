"""Load a Hugging Face folder into tensors: safetensors, quantisation, sharding."""
