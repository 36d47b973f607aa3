"""Run each client against a real server of keeper and print the results. `make clients` installs
the clients.

python -m tests.clients --environments .venv/clients --vllm path/to/python
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.clients.answers import lm_eval
from tests.clients.libraries import libraries
from tests.clients.loads import LOADS, Target, report
from tests.support.e2e.server import Server
from tidemill.workers.sources.names import bundled

NAME = "keeper"


def main() -> int:
    """1 when a client has found anything wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", help="of the clients to run; all by default")
    options.add_argument("--environments", type=Path, required=True, help="a folder with one of each")
    options.add_argument("--vllm", type=Path, help="a Python that has vllm; without, it is left out")
    chosen = options.parse_args()
    clients = {**LOADS, "lm-eval": lm_eval, "libraries": libraries}
    names = chosen.names or [name for name in clients if name != "vllm" or chosen.vllm]
    with tempfile.TemporaryDirectory(prefix="clients-") as scratch:
        arguments = [NAME, "--port", "0", "--prefill", "1", "--decode", "1", "--memory", "128MiB"]
        with Server(arguments, Path(scratch) / "log") as server:
            target = Target(url=server.url, model=NAME, tokenizer=bundled()[NAME])
            wrong = False
            for name in names:
                folder = Path(scratch) / name
                folder.mkdir()
                python = chosen.vllm if name == "vllm" else chosen.environments / name / "bin" / "python"
                found = clients[name](python.absolute(), target, folder)
                wrong |= report(name, found)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
