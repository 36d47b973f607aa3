"""The parts that HTTP and gRPC requests share: bodies, checks, API keys, limits, answers."""
