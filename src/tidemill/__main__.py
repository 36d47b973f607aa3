"""`python -m tidemill` is the `tidemill` command."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the working directory, whose modules are none of ours

from tidemill.cluster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
