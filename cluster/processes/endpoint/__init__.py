"""The sockets and servers of an edge process, and its link to the other edges of a server."""
