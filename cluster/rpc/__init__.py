"""gRPC between processes: clients of workers and routers, codecs and channels."""
