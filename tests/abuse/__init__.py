"""The tests of abuse that need a real server: run all of them with `make abuse`."""
