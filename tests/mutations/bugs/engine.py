"""Bugs to plant in the engine's step loop, commits and prefetches."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "a rank runs a step that the leader cancelled",
        "workers/engine/build_rank.py::_tokens",
        "return None if $NONE in $TOLD else $TOLD",
        "return $TOLD",
        "tests/unit/workers/parallel/test_group.py",
    ),
    Planted(
        "an aborted sequence continues",
        "workers/engine/commit.py::StepCommitter.commit",
        "if $LEASE.$ENDED:",
        "if False:",
        "tests/unit/workers/engine/test_engine.py tests/sim/test_serving.py",
    ),
    Planted(
        "every boundary of an answer keeps its checkpoint",
        "workers/engine/commit.py::StepCommitter._keep_state",
        "if $DEPTH in $SEQUENCE.$RESTORE.$CUTS or $DEPTH in $SEQUENCE.$RESTORE.$JUNCTIONS:",
        "if $DEPTH % $SEQUENCE.page_tokens == 0:",
        "tests/unit/workers/engine/test_engine.py tests/unit/workers/engine/test_strategies.py",
    ),
    Planted(
        "a stream moves before its state is stored",
        "workers/engine/drain.py::Drain._is_stored",
        "return $SEQUENCE.$DELIVERY.$PUBLICATION.$TASK is None",
        "return True",
        "tests/unit/workers/engine/test_drain.py",
    ),
    Planted(
        "a producer promises pages that the store refused",
        "workers/engine/engine.py::Engine.produce",
        "$TARGET if $STORED else 0,",
        "$TARGET,",
        "tests/unit/workers/engine/test_engine_store.py",
    ),
    Planted(
        "priorities are ignored",
        "workers/engine/intake.py::RequestIntake._sequence",
        "$NOW_S + $REQUEST.$PRIORITY * $PRIORITY_AGE_S +",
        "$NOW_S +",
        "tests/unit/workers/scheduling/test_priority.py",
    ),
    Planted(
        "a failed step isolates no request",
        "workers/engine/pipeline.py::Pipeline._broke",
        "continue $PLANNED.$SEQUENCE.$ISOLATION.$UNTIL = $PLANNED.$FLIGHT.$END $ALONE",
        "continue\n            $ALONE",
        "tests/unit/workers/engine/test_pipeline.py",
    ),
    Planted(
        "one failed step stops the worker",
        "workers/engine/pipeline.py::Pipeline.step",
        "$FAILURES = 0 self.",
        "",
        "tests/unit/workers/engine/test_pipeline.py",
    ),
    Planted(
        "the step loop returns while steps are in flight",
        "workers/engine/pipeline.py::Pipeline.settle",
        "await $ASYNCIO.$WAIT([$STEP.$ANSWER]) $STEP.$ANSWER.$EXCEPTION()",
        "pass",
        "tests/unit/workers/engine/test_pipeline.py",
    ),
    Planted(
        "a prefetch takes the last free memory",
        "workers/engine/prefetcher.py::Prefetcher._fill",
        "$NUM_PAGES - $FIRST",
        "0",
        "tests/unit/workers/engine/test_prefetcher.py",
    ),
    Planted(
        "a cancelled prefetch frees its memory under the transfer",
        "workers/engine/prefetcher.py::Prefetcher.run",
        "return await $ASYNCIO.$SHIELD($TASK)",
        "return await $TASK",
        "tests/unit/workers/engine/test_prefetcher.py",
    ),
    Planted(
        "pages that the store refused count as published",
        "workers/engine/publisher.py::Publisher._run",
        "if $PUBLICATION.$COMPLETE:",
        "if $PUBLICATION:",
        "tests/unit/workers/engine/test_prefetcher.py",
    ),
    Planted(
        "the checkpoint of a junction is dropped in favour of later pages",
        "workers/engine/publisher.py::Publisher.publish",
        "if len($PIECES) > 1 and not $PIECES[-1].$CHECKPOINT:",
        "if len($PIECES) > 1:",
        "tests/unit/workers/engine/test_prefetcher.py tests/unit/workers/engine/test_engine_store.py",
    ),
    Planted(
        "tokens drawn before a worker was lost count as the prompt",
        "workers/messages.py::Request.to_score",
        "self.$DRAWN - 1",
        "1",
        "tests/unit/workers/engine/test_prompt_logprobs.py",
    ),
)
