"""Bugs to plant in what people do with a running server: more and fewer workers, looking, asking for help."""

from tests.mutations.planted import UNIT, Planted

SCALE = f"{UNIT}/cluster/supervisor/test_scale.py"
TOP = f"{UNIT}/cluster/cli/test_top.py"
LIVE = f"{UNIT}/cluster/cli/test_watch_screen.py"
SUPPORT = f"{UNIT}/cluster/edge/http/test_support.py"

OPERATIONS_BUGS = (
    Planted(
        "an order that finds no place starts a part of it",
        "cluster/supervisor/scaler.py",
        "if lacks is not None and not pending:",
        "if lacks is not None and not pending and not new:",
        SCALE,
    ),
    Planted(
        "a person's order goes beyond the bounds",
        "cluster/supervisor/scaler.py",
        "not bounds.least <= wanted <= bounds.most",
        "not bounds.least <= wanted",
        SCALE,
    ),
    Planted(
        "the last worker of a role is sent away",
        "cluster/supervisor/scaler.py",
        "if wanted < 1:",
        "if wanted < 0:",
        SCALE,
    ),
    Planted(
        "a worker that comes up late is not told that it is to go",
        "cluster/supervisor/scaler.py",
        "elif worker.leaves and name in rows and not worker.is_told:",
        "elif worker.leaves and name in rows and worker.is_told:",
        SCALE,
    ),
    Planted(
        "the busiest workers go first",
        "cluster/supervisor/scaler.py",
        "        return sorted(names, key=order)",
        "        return sorted(names, key=order, reverse=True)",
        SCALE,
    ),
    Planted(
        "a drained worker that died is not let back",
        "cluster/supervisor/scaler.py",
        "_hear(worker, rows.get(name), is_kept=not self._bounds)",
        "_hear(worker, rows.get(name), is_kept=False)",
        SCALE,
    ),
    Planted(
        "waiting for workers ends while they start",
        "cluster/cli/worker_commands.py",
        'any(one["starting"] or one["leaving"]',
        'any(one["leaving"]',
        SCALE,
    ),
    Planted(
        "rates are of the time between looks instead of heartbeats",
        "cluster/cli/top.py",
        'passed_s + before["heard_ago_s"] - after["heard_ago_s"]',
        "passed_s",
        TOP,
    ),
    Planted(
        "a new life is compared with the one before it",
        "cluster/cli/top.py",
        'lives = {one["info"]["worker"]: one',
        'lives = {after.status["workers"][0]["info"]["worker"]: one',
        TOP,
    ),
    Planted(
        "a server that began anew has negative rates",
        "cluster/cli/top.py",
        "return after - before if after >= before else after",
        "return after - before",
        TOP,
    ),
    Planted(
        "latencies are those since the start",
        "cluster/metrics/scrape.py",
        "if before.bounds != self.bounds or before.count > self.count:",
        "if before.bounds == self.bounds or before.count > self.count:",
        TOP,
    ),
    Planted(
        "a watch ends when the server is away",
        "cluster/cli/watch_screen.py",
        "            found = error\n",
        "            raise error from None\n",
        LIVE,
    ),
    Planted(
        "keys stay in a support bundle",
        "cluster/observability/redact.py",
        r'    (re.compile(r"\b(?:sk|hf)[-_][A-Za-z0-9_-]{6,}"), ""),',
        "",
        SUPPORT,
    ),
    Planted(
        "digests of keys stay in a support bundle",
        "cluster/observability/redact.py",
        r"[0-9a-fA-F]{64,}",
        r"[0-9a-fA-F]{65,}",
        SUPPORT,
    ),
    Planted(
        "the key that a command asked with stays in its bundle",
        "cluster/cli/support_bundle.py",
        "known = [server.api_key]",
        "known = ['']",
        SUPPORT,
    ),
    Planted(
        "a part that could not be had goes unsaid",
        "cluster/cli/support_bundle.py",
        'one.error or "ok"',
        '"ok"',
        SUPPORT,
    ),
    Planted(
        "others can read a support bundle",
        "cluster/cli/support_bundle.py",
        "    os.fchmod(opened, PRIVATE)",
        "    os.fchmod(opened, 0o644)",
        SUPPORT,
    ),
)
