"""vLLM under our router and over our page stores, beside vLLM alone: on CPUs, with a random dense model."""
