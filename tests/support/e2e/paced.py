"""`tidemill` with engines that have no model but a capacity, and fleets that shrink without pauses: of each
worker `max_num_batched_tokens` is the number of prompt tokens in a second, `max_num_seqs` that of rows.

python -m tests.support.e2e.paced serve --config cluster.yaml
"""

import sys
from functools import partial

from tidemill.cluster.cli import main as cli
from tidemill.cluster.config import fleets
from tidemill.cluster.settings import OWN_ENGINE

if __name__ == "__main__":
    OWN_ENGINE["build"] = "tests.support.cluster.fake_engine:build"
    fleets.Hysteresis = partial(fleets.Hysteresis, cool_s=0.5, drain_s=5.0)  # pyrefly: ignore[bad-assignment]
    sys.exit(cli.main())
