"""Generate docs/metrics.md: `python -m tidemill.cluster.metrics.reference > docs/metrics.md`."""

import sys
from collections.abc import Iterable

from tidemill.cluster.metrics.exposition import ALIASES
from tidemill.cluster.metrics.specs import (
    EDGE,
    EDGE_UP,
    FAILED_ROUNDS,
    PREFIX,
    ROUTER_FAILED_ROUNDS,
    STATE_OF_MODELS,
    STATUSES,
    SUPERVISOR_FAILED_ROUNDS,
    Spec,
)
from tidemill.cluster.metrics.worker_metrics import COUNTERS, GAUGES, MEMORY, STATES, spec_of

INTRODUCTION = """\
# Metrics

Made from the code by `make metrics-doc`; a test compares. `GET /metrics` has all of these in the text format
of Prometheus, `HEAD /metrics` is answered. What to look at first is in [operations.md](operations.md), a
Grafana dashboard in [deploy/grafana](../deploy/grafana).

- Names, units and meanings are those of vLLM where it has such a thing, under a prefix of our own. With
  `--metrics-alias vllm` those marked with * are there as `vllm:...` as well, for load generators and gateways
  that read them.
- `model_name` is the first name of a served model. Labels come from fixed sets, whatever clients send.
- Counters of workers are those of one life: a worker that was restarted begins at 0 under its old name, which
  `rate()` and `increase()` take for what it is. Sum over workers after `rate()`, never before.
  `worker_ownership_violations_total` goes on over restarts: a violation ends its worker.
- Counters exist at 0 from the start of an edge and of a worker, except those by `reason`, `outcome`, `rank`,
  `position`, and by a `code` other than those below: they begin with their first event, which `increase()`
  does not see. The codes are CODES.
- Times are those of the frontend: a request begins when its body has been read.
- An edge process that does not answer a scrape within a second has `tidemill:edge_up` 0, and counts as in its
  last answer, so that no sum falls.
- A histogram has `_bucket`, `_sum` and `_count`.
"""


def reference() -> str:
    counters = map(spec_of, COUNTERS)
    return "\n".join(
        (
            INTRODUCTION.replace("CODES", ", ".join(map(str, STATUSES))),
            *_section("Requests, at the frontend", (*EDGE, FAILED_ROUNDS)),
            *_section("The edge processes of a server now", [EDGE_UP]),
            *_section(
                "A model's fleet now", (*STATE_OF_MODELS, ROUTER_FAILED_ROUNDS, SUPERVISOR_FAILED_ROUNDS)
            ),
            *_section("Each worker now", [*GAUGES, MEMORY, *STATES.values()]),
            *_section("Each worker since its start", counters),
        )
    )


def _section(title: str, specs: Iterable[Spec]) -> Iterable[str]:
    yield f"## {title}\n"
    yield "| metric | type | unit | labels | meaning |\n|---|---|---|---|---|"
    for spec in specs:
        mark = " *" if any(spec.name in names for names in ALIASES.values()) else ""
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        yield f"| `{scraped_name(spec)}`{mark} | {spec.kind} | {spec.unit} | {labels} | {spec.text} |"
    yield ""


def scraped_name(spec: Spec) -> str:
    return PREFIX + spec.name + ("_total" if spec.kind == "counter" else "")


if __name__ == "__main__":
    sys.stdout.write(reference())
