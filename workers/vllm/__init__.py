"""An adapter: vLLM as the engine of a worker, over HTTP. Nothing of vLLM is imported; start at build.py."""
