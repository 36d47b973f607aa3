"""What a planted bug is, and the fast tests that notice one."""

from dataclasses import dataclass

UNIT = "tests/unit"
ARENA = f"{UNIT}/kvstore/test_arena.py"
INDEX = f"{UNIT}/kvstore/test_index.py"
KEYS = f"{UNIT}/kvstore/test_keys.py"
LAYOUT = f"{UNIT}/kvstore/test_layout.py"
LEDGER = f"{UNIT}/kvstore/test_ledger.py {UNIT}/kvstore/test_leases.py"
PLAN = f"{UNIT}/workers/test_plan.py"
SAMPLING = f"{UNIT}/workers/test_sampling.py"
RUNNER = f"{UNIT}/workers/test_runner.py"
ENGINE = f"{UNIT}/workers/test_engine.py"
STORE = f"{UNIT}/workers/test_engine_store.py"
FLEET = f"{UNIT}/cluster/test_fleet.py"
PLACEMENT = f"{UNIT}/cluster/test_placement.py"
ROUTER = f"{UNIT}/cluster/test_router.py"
FLOW = f"{UNIT}/cluster/test_flow.py"
SIM = "tests/sim/test_serving.py"


@dataclass(frozen=True)
class Planted:
    """`old`, which `file` holds once, becomes `new`; `tests` must fail."""

    bug: str
    file: str
    old: str
    new: str
    tests: str
