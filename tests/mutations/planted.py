"""What a planted bug is, and the fast tests that notice one."""

from dataclasses import dataclass

UNIT = "tests/unit"
ARENA = f"{UNIT}/kvstore/memory/test_arena.py"
INDEX = f"{UNIT}/kvstore/memory/test_prefix_index.py"
KEYS = f"{UNIT}/kvstore/test_keys.py"
LAYOUT = f"{UNIT}/kvstore/test_layout.py"
LEDGER = f"{UNIT}/kvstore/memory/test_ledger.py {UNIT}/kvstore/memory/test_lease.py"
PLAN = f"{UNIT}/workers/scheduling/test_plan.py"
SAMPLING = f"{UNIT}/workers/execution/test_sampler.py"
RUNNER = f"{UNIT}/workers/execution/test_model_runner.py"
ENGINE = f"{UNIT}/workers/engine/test_engine.py"
STORE = f"{UNIT}/workers/engine/test_engine_store.py"
FLEET = f"{UNIT}/cluster/router/test_fleet_view.py"
PLACEMENT = f"{UNIT}/cluster/router/test_placement.py"
ROUTER = f"{UNIT}/cluster/router/test_router.py"
FLOW = f"{UNIT}/cluster/edge/test_flow.py"
SIM = "tests/sim/test_serving.py"


@dataclass(frozen=True)
class Planted:
    """`old`, which `file` holds once, becomes `new`; `tests` must fail."""

    bug: str
    file: str
    old: str
    new: str
    tests: str
