"""The `tidemill` command, one module per subcommand."""
