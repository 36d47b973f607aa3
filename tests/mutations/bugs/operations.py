"""Bugs to plant in the CLI, the configuration and the Helm chart."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "processes listen on all interfaces by default",
        "cluster/cli/security.py::with_cluster_security",
        '"127.0.0.1" if $CONFIG.$HOST == "loopback" else None',
        "None",
        "tests/unit/cluster/rpc/test_mutual_tls.py",
    ),
    Planted(
        "the caller's API key stays in its support bundle",
        "cluster/cli/support_bundle.py::write_bundle",
        "$KNOWN = [$SERVER.$API_KEY]",
        "$KNOWN = ['']",
        "tests/unit/cluster/edge/http/test_support.py",
    ),
    Planted(
        "waiting for workers ends while workers start",
        "cluster/cli/worker_commands.py::is_settled",
        '"starting"] or $ONE[',
        "",
        "tests/unit/cluster/supervisor/test_scale.py",
    ),
    Planted(
        "a worker reserves addresses for its own share only",
        "cluster/config/fleets.py::_memory_max_bytes",
        "$TOTAL_BYTES += $LENDER.$REPLICAS * $LENT_BYTES",
        "$TOTAL_BYTES = $LENT_BYTES",
        "tests/unit/cluster/config/test_fleets.py",
    ),
    Planted(
        "flags modify the tree read from the file",
        "cluster/config/overrides.py::apply_flags",
        "$TREE = $DEEPCOPY(dict($TREE))",
        "$TREE = dict($TREE)",
        "tests/unit/cluster/config/test_flags.py",
    ),
    Planted(
        "a plain-text secret is reported as an unknown key",
        "cluster/config/problems.py::_unknown_key",
        "if $NAME in $IN_CLEAR:",
        "if not $NAME:",
        "tests/unit/cluster/config/test_reading.py",
    ),
    Planted(
        "the last of two duplicate keys wins",
        "cluster/config/reading.py::_parse",
        "} $CHECK_KEYS($ROOT) return",
        "}\n        return",
        "tests/unit/cluster/config/test_reading.py",
    ),
    Planted(
        "latency metrics cover the time since the start",
        "cluster/metrics/scrape.py::HistogramSnapshot.since",
        "if $BEFORE.$BOUNDS != self.$BOUNDS or $BEFORE.$COUNT > self.$COUNT:",
        "if $BEFORE.$BOUNDS == self.$BOUNDS or $BEFORE.$COUNT > self.$COUNT:",
        "tests/unit/cluster/cli/test_top.py",
    ),
    Planted(
        "keys stay in a support bundle",
        "cluster/observability/redact.py",
        ', ($RE.compile(r"\\b(?:sk|hf)[-_][A-Za-z0-9_-]{6,}"), ""), #',
        ",\n\n    #",
        "tests/unit/cluster/edge/http/test_support.py",
    ),
    Planted(
        "containers can write to their root file system",
        "deploy/helm/tidemill/templates/_pods.tpl",
        "$FALSE $READONLYROOTFILESYSTEM: $TRUE $RUNASNONROOT: $TRUE",
        "$FALSE\n$READONLYROOTFILESYSTEM: $FALSE\n$RUNASNONROOT: $TRUE",
        "tests/deploy/test_pods.py",
    ),
    Planted(
        "a pod requests resources for one rank of a group",
        "deploy/helm/tidemill/templates/_ray.tpl",
        "{ $DEFAULT 1 $$GROUP.$TENSOR_PARALLEL_SIZE |",
        "{ 1 |",
        "tests/deploy/test_pods.py",
    ),
    Planted(
        "the edge is killed while it drains",
        "deploy/helm/tidemill/templates/frontend.yaml",
        "{{ $ADD .$VALUES.$FRONTEND.$DRAINSECONDS 30 }}",
        "30",
        "tests/deploy/test_pods.py",
    ),
    Planted(
        "a simulated agent asks again before it has its answer",
        "cluster/simulate/world.py::_serve_in_turn",
        "await $CLUSTER.serve($REQUEST, $NUMBER, $ROUTER)",
        "asyncio.create_task($CLUSTER.serve($REQUEST, $NUMBER, $ROUTER))",
        "tests/unit/cluster/simulate/test_agents.py",
    ),
)
