"""Model architectures, each from a normal Hugging Face folder. Start at registry.py."""
