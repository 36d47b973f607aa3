"""`python -m tidemill` is the `tidemill` command."""

import sys

from tidemill.cluster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
