"""The APIs of the edge: a body becomes requests, and a writer gives their answers its form."""
