"""Chat templates, tokenizers, and the tool-call formats of model families."""
