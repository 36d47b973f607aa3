"""From a Hugging Face folder to tensors: safetensors, quantisation, sharding."""
