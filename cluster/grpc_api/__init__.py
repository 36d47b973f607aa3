"""The public gRPC endpoint: the same requests as over HTTP, for the same models and by the same rules."""
