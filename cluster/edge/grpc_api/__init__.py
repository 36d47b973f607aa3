"""The public gRPC API, defined in `rpc/proto/generation.proto`."""
