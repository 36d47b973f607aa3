"""The Triton kernels as Triton's interpreter runs them: `make triton`."""
