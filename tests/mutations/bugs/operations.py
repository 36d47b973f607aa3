"""Bugs to plant in the CLI, the configuration and the Helm chart."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "the panic of a library in Rust ends what repeats itself",
        "kvstore/periodic.py::every",
        "except BaseException as",
        "except Exception as",
        "tests/unit/kvstore/test_periodic.py",
    ),
    Planted(
        "a call that another task cancelled ends what repeats itself",
        "kvstore/periodic.py::_is_cancelled",
        "$CURRENT.cancelling() > 0",
        "True",
        "tests/unit/kvstore/test_periodic.py",
    ),
    Planted(
        "a pipe in place of a file stops its reader",
        "kvstore/files.py::open_regular",
        "S_ISREG(",
        "bool(",
        "tests/unit/kvstore/test_files.py",
    ),
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
        "the last of two duplicate keys wins",
        "cluster/config/reading.py::_parse",
        "} $CHECK_KEYS($ROOT) return",
        "}\n        return",
        "tests/unit/cluster/config/test_reading.py",
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
)
