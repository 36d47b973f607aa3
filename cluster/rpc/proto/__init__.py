"""Protobuf definitions and the stubs that the build generates from them."""
