"""Places of models: bundled ones, folders, the Hugging Face hub, object stores."""
