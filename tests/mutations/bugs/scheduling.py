"""Bugs to plant in the scheduler and admission."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "the memory of a late fetch is freed while it still writes",
        "workers/scheduling/admission.py::Admission._leave",
        "$MOVING.add_done_callback($ENDED)",
        "$ENDED($MOVING)",
        "tests/sim/test_serving.py",
    ),
    Planted(
        "a partial fetch counts as complete",
        "workers/scheduling/admission.py::Admission._fetch",
        "$GOOD == $TARGET or",
        "$GOOD > 0 or",
        "tests/unit/workers/engine/test_engine_store.py tests/sim/test_serving.py",
    ),
    Planted(
        "the last token of a prompt is restored instead of computed",
        "workers/scheduling/admission.py::Admission.admit",
        "[: $SEQUENCE.$RESTORABLE // $SEQUENCE.$PAGE_TOKENS]",
        "",
        "tests/unit/workers/engine/test_whole_runs.py tests/unit/workers/engine/test_engine_store.py",
    ),
    Planted(
        "admission leaves no page for running requests",
        "workers/scheduling/admission.py::Admission._lease",
        ": $BESIDE + $LATER, ",
        ": $LATER, ",
        "tests/unit/workers/engine/test_budget.py",
    ),
    Planted(
        "freed memory wakes no waiting request",
        "workers/scheduling/admission_queue.py::AdmissionQueue.memory_freed",
        "self.$NEWS.set()",
        "pass",
        "tests/unit/workers/scheduling/test_admission_queue.py",
    ),
    Planted(
        "promised pages are given to others",
        "kvstore/memory/cache.py::Cache.could_hold",
        " + self.$PROMISED_PAGES}",
        "}",
        "tests/unit/workers/scheduling/test_admission.py",
    ),
    Planted(
        "isolated requests run together",
        "workers/scheduling/isolation.py::IsolatedRuns.choose",
        "$ROW is self.$SUSPECT",
        "$ROW.is_suspect",
        "tests/unit/workers/scheduling/test_scheduler.py",
    ),
    Planted(
        "a chunk ends inside a page",
        "workers/scheduling/plan.py::_row_tokens",
        "max(0, ($ONE.$COMPUTED + $LEFT) // $PAGE_TOKENS * $PAGE_TOKENS - $ONE.$COMPUTED)",
        "$LEFT",
        "tests/unit/workers/scheduling/test_plan.py",
    ),
    Planted(
        "long prompts delay decoding streams",
        "workers/scheduling/plan.py::plan",
        "$PROMPTS_LEFT = min($LEFT, $PROMPT_TOKENS_MAX)",
        "$PROMPTS_LEFT = $LEFT",
        "tests/unit/workers/scheduling/test_plan.py",
    ),
    Planted(
        "the decode-only step time is never measured again",
        "workers/scheduling/prefill_throttle.py::PrefillThrottle.prompt_tokens",
        "if not self.$LIGHTS_S or self.$SINCE_LIGHT >= $SAMPLES:",
        "if not self.$LIGHTS_S or False:",
        "tests/unit/workers/scheduling/test_prefill_throttle.py",
    ),
    Planted(
        "requests that wait for a lost request's prefix wait forever",
        "workers/scheduling/prefix_dedup.py::InProgressPrefixes.left",
        "for $X, $REACHED in self.$FOLLOWERS.$POP($SEQUENCE.id, []): $REACHED.set()",
        "pass",
        "tests/unit/workers/scheduling/test_prefix_dedup.py tests/unit/workers/engine/test_shared_prompts.py",
    ),
    Planted(
        "a token is drawn in the middle of a prompt",
        "workers/scheduling/scheduler.py::Scheduler._launch",
        "and $END >= len($SEQUENCE.$TOKENS) else",
        "else",
        "tests/unit/workers/engine/test_whole_runs.py tests/unit/workers/engine/test_engine_store.py",
    ),
    Planted(
        "a sequence runs past the last token of its answer",
        "workers/scheduling/sequence.py::Sequence.to_run",
        "$KNOWN + 1 < self",
        "$KNOWN < self",
        "tests/unit/workers/scheduling/test_scheduler.py",
    ),
    Planted(
        "accepted drafts continue past a stop token",
        "workers/scheduling/sequence.py::Sequence.draw",
        '"length" if $FINISH is not None: break self',
        '"length"\n        self',
        "tests/unit/workers/engine/test_whole_runs.py",
    ),
)
