"""The serving cluster: request flow, router, Ray actors, HTTP and gRPC edge. Start at flow.py."""
