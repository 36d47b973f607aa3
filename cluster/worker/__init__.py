"""A worker process: its gRPC server, heartbeats and current assignment."""
