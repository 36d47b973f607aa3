"""Generated from tidemill.proto; never edited by hand (`make stubs`)."""
