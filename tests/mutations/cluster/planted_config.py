"""Bugs to plant in the configuration of a cluster: what files and flags say, and what becomes of it."""

from tests.mutations.planted import UNIT, Planted

READING = f"{UNIT}/cluster/config/test_reading.py"
FLAGGED = f"{UNIT}/cluster/config/test_flags.py"
MADE = f"{UNIT}/cluster/config/test_fleets.py"

OVERRIDES = "cluster/config/overrides.py"
FLEETS = "cluster/config/fleets.py"

CONFIG_BUGS = (
    Planted(
        "flags write into the tree of the file",
        OVERRIDES,
        "tree = deepcopy(dict(tree))",
        "tree = dict(tree)",
        FLAGGED,
    ),
    Planted(
        "a flag of all workers goes before that of a role",
        OVERRIDES,
        "key=lambda one: one.flag.scope in ROLES",
        "key=lambda one: one.flag.scope not in ROLES",
        FLAGGED,
    ),
    Planted(
        "a flag of a role adds workers to models that have none of it",
        OVERRIDES,
        "if role not in asked or any(_groups(*model, role) for model in models):",
        "if role not in asked:",
        FLAGGED,
    ),
    Planted(
        "every group of a role grows",
        OVERRIDES,
        'groups[:1] if flag.key == "replicas_max" else groups',
        "groups",
        FLAGGED,
    ),
    Planted(
        "a worker has address space for its own share alone",
        FLEETS,
        "sum(one.replicas * parse_bytes(one.memory) for one in lenders if _kind(one.device) == kind)",
        "parse_bytes(group.memory)",
        MADE,
    ),
    Planted(
        "memory is lent between kinds of devices",
        FLEETS,
        " for one in lenders if _kind(one.device) == kind)",
        " for one in lenders)",
        MADE,
    ),
    Planted(
        "a worker has address space for the memory of its own model alone",
        FLEETS,
        "lenders = [one for other in config.models if other.engine.memory_broker for one in other.groups]",
        "lenders = model.groups",
        MADE,
    ),
    Planted(
        "a model that lends nothing takes part in the broker",
        FLEETS,
        "        if not router.broker:\n            return router\n",
        "",
        MADE,
    ),
    Planted(
        "the broker waits for the workers of one model alone",
        FLEETS,
        "for router in lenders for name in router.expected",
        "for name in lenders[0].expected",
        MADE,
    ),
    Planted(
        "two groups of a role have workers of one name",
        FLEETS,
        "first = sum(worker.role == group.role for worker in workers)",
        "first = 0",
        MADE,
    ),
    Planted(
        "bounds forget the groups that do not grow",
        FLEETS,
        "least - group.replicas + group.replicas_max",
        "group.replicas_max",
        MADE,
    ),
    Planted(
        "a secret in clear is an unknown key like others",
        "cluster/config/problems.py",
        "    if name in IN_CLEAR:\n",
        "    if not name:\n",
        READING,
    ),
    Planted(
        "of two keys that are called the same the last one counts",
        "cluster/config/reading.py",
        "        _check_keys(root)\n",
        "",
        READING,
    ),
)
