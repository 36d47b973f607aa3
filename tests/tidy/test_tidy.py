"""House rules no linter knows. Add a rule here before repeating a review comment."""

import ast
import re
from collections.abc import Iterator

from tests.tidy.tree import EVERYTHING, PRODUCT, ROOT, Source, none

HOUSE_WORDS_NOT_USED = ("manager", "handler", "helper", "util", "utils", "mixin", "misc")
OVERRIDDEN = ("get_route_handler",)  # methods of libraries, which name them

# One home for each outside library; everything else sees it through our own type.
HOMES = {
    "ray": (
        "cluster/processes/launch.py",
        "cluster/processes/router_actor.py",
        "cluster/processes/supervisor",
        "cluster/processes/support_info.py",
        "cluster/processes/worker_actor.py",
    ),
    "fastapi": "cluster/edge/",
    "grpc": "cluster/",
    "opentelemetry": "cluster/",
    "opentelemetry.sdk": "cluster/observability/otel.py",
    "opentelemetry.exporter": "cluster/observability/otel.py",
    "prometheus_client": "cluster/metrics/",
    "pythonjsonlogger": "cluster/observability/logs.py",
    "jinja2": "cluster/edge/chat/jinja_template.py",
    "tokenizers": "cluster/edge/chat/tokenizer",
    "mooncake": "kvstore/stores/mooncake_store.py",
    "kvcached": "kvstore/memory/backing.py",
    "triton": "kernels/",
    "argparse": "cluster/cli/",
    "cryptography": ("cluster/processes/joining/authority.py", "cluster/rpc/guard.py"),
    "sqlite3": "cluster/edge/records/database.py",
    "psycopg": "cluster/edge/records/database.py",
    "zmq": ("workers/engine/zmq_publisher.py", "workers/vllm/events.py"),
    "vllm": "connect/vllm.py",
    "llguidance": "workers/execution/grammar",
    "torch.distributed": "workers/parallel/distributed.py",
}


CLI = "cluster/cli/main.py"
READ_ONCE = {"os.environ", "os.getenv"}
SET_ENVIRONMENT = {CLI, "kvstore/stores/mooncake_store.py", "workers/parallel/distributed.py"}
"""Files of libraries that read nothing else."""

READ_CLOCK = {CLI, "cluster/processes/supervisor.py"}
"""The supervisor is an actor without a caller, and tokens end at a time of the day."""

PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
RUN_TEXT = {"eval", "exec", "torch.load", "yaml.load"}


def test_files_state_their_responsibility() -> None:
    none(
        (source.name for source in PRODUCT if not ast.get_docstring(source.tree)),
        "the first line of a file states its responsibility",
    )


def test_no_hidden_inputs_and_no_hidden_state() -> None:
    found: list[str] = []
    for source in PRODUCT:
        found += [f"{source.name}:{node.lineno}: global" for node in source.nodes(ast.Global)]
        for node in source.nodes(ast.Attribute):
            text = ast.unparse(node) if node.attr in {"environ", "getenv", "time", "random"} else ""
            if (
                (text in READ_ONCE and source.name not in SET_ENVIRONMENT)
                or (text == "time.time" and source.name not in READ_CLOCK)
                or (text == "random.random" and source.name != CLI)
            ):
                found.append(f"{source.name}:{node.lineno}: {text}")
    none(found, f"read the environment once, in {CLI}; take a clock or a Random as an argument")


def modules(source: Source) -> Iterator[tuple[int, str, list[str]]]:
    """Yield each import's line, module and what it takes from there."""
    for node in source.nodes(ast.Import):
        for alias in node.names:
            yield node.lineno, alias.name, []
    for node in source.nodes(ast.ImportFrom):
        yield node.lineno, node.module or "", [alias.name for alias in node.names]


def test_nothing_unpickles() -> None:
    """Bytes from a socket, a store or a model folder never become code."""
    found: list[str] = []
    for source in PRODUCT:
        found += [
            f"{source.name}:{line}" for line, name, names in modules(source) if PICKLES & {name, *names}
        ]
        calls = ((node.lineno, ast.unparse(node.func)) for node in source.nodes(ast.Call))
        found += [f"{source.name}:{line}: {name}" for line, name in calls if name in RUN_TEXT]
    none(found, "bytes from outside never become code")


def _passes_on(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Attribute) and node.attr == "set_exception")


def test_broad_handlers_pass_the_error_on() -> None:
    none(
        (
            f"{source.name}:{node.lineno}"
            for source in PRODUCT
            for node in source.nodes(ast.ExceptHandler)
            if node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
            if not any(map(_passes_on, ast.walk(node)))
        ),
        "an `except` of everything raises, or gives the error to a future",
    )


def test_what_is_repeated_for_ever_survives_a_failed_round() -> None:
    """A loop that sleeps and has no end of its own is `every`, or belongs to one call of a client."""
    allowed = {"every", "_watch"}
    none(
        (
            f"{source.name}:{node.lineno}: {node.name}"
            for source in PRODUCT
            if source.name.startswith(("kvstore/", "workers/", "cluster/"))
            for node in source.nodes(ast.AsyncFunctionDef)
            if node.name not in allowed
            for loop in ast.walk(node)
            if isinstance(loop, ast.While)
            and ast.unparse(loop.test) == "True"
            and re.search(r"asyncio\.sleep\((?!0\))", ast.unparse(loop))
            and not any(isinstance(end, ast.Return | ast.Break) for end in ast.walk(loop))
        ),
        "use kvstore/periodic.py",
    )


def test_outside_libraries_have_one_home() -> None:
    none(
        (
            f"{source.name}:{line}: {name} belongs in {home}"
            for source in PRODUCT
            for line, name, _ in modules(source)
            for library, home in HOMES.items()
            if f"{name}.".startswith(f"{library}.") and not source.name.startswith(home)
        ),
        "use our own type, or import the library where it has its home",
    )


def test_kernels_cannot_shadow_another_package() -> None:
    """`transformers` imports whatever is called `kernels`: a checkout on sys.path must not hide it."""
    assert not (ROOT / "kernels/__init__.py").exists()


def test_every_test_file_is_in_exactly_one_folder() -> None:
    real = {"browser", "deploy", "engines", "gpu", "triton"}
    kinds = {"unit", "sim", "parity", "e2e", "tidy", "mutations"} | real
    tests = (source for source in EVERYTHING if source.name.startswith("tests/") and "/test_" in source.name)
    none((test.name for test in tests if test.name.split("/")[1] not in kinds), f"tests live in {kinds}")


def test_house_words() -> None:
    """STYLE: words that say nothing, or that the field uses for something else."""
    none(
        (
            f"{source.name}:{node.lineno}: {node.name}"
            for source in PRODUCT
            for node in source.nodes(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if node.name not in OVERRIDDEN
            for word in HOUSE_WORDS_NOT_USED
            if word in node.name.lower().split("_")
            or (isinstance(node, ast.ClassDef) and node.name.lower().endswith(word))
        ),
        "a name says what it is",
    )
