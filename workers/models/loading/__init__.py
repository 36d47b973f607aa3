"""Load a Hugging Face folder or GGUF files into tensors: safetensors, quantisation, sharding."""
