"""Bugs to plant in the engine's step loop, commits and prefetches."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "a worker goes on after a violation",
        "workers/engine/audit.py::Audit.run",
        "raise OwnershipBroken($TEXT) from $ERROR",
        "$TEXT",
        "tests/unit/workers/engine/test_audit.py",
    ),
    Planted(
        "an item overtakes those that wait for a pause",
        "workers/inbox.py::Inbox.put",
        "if idle is None or take is None or idle.done():",
        "if take is None:",
        "tests/unit/workers/test_inbox.py",
    ),
    Planted(
        "streams of a worker with a violation are not ended",
        "workers/engine/engine.py::Engine._end_streams",
        "sequence.delivery.inbox.put(WorkerGone(LOOP_ENDED))",
        "pass",
        "tests/unit/workers/engine/test_audit.py",
    ),
    Planted(
        "a request is blamed for a device that failed",
        "workers/engine/pipeline.py::Pipeline.step",
        "if is_sticky($ERROR):",
        "if False:",
        "tests/unit/workers/engine/test_pipeline.py",
    ),
    Planted(
        "an aborted sequence continues",
        "workers/engine/commit.py::StepCommitter.commit",
        "if $LEASE.$ENDED: self.$VOID(",
        "if False:\n            self.$VOID(",
        "tests/unit/workers/engine/test_whole_runs.py",
    ),
    Planted(
        "a checkpoint inside a row is not published",
        "workers/engine/commit.py::StepCommitter._publish_inside",
        "$DEPTH == $BOUNDARY:",
        "False:",
        "tests/unit/workers/engine/test_whole_runs.py tests/unit/workers/engine/test_engine_store.py",
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
        "the step loop returns while steps are in flight",
        "workers/engine/pipeline.py::Pipeline.settle",
        "await $ASYNCIO.$WAIT([$STEP.$ANSWER]) $STEP.$ANSWER.$EXCEPTION()",
        "pass",
        "tests/unit/workers/engine/test_pipeline.py",
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
        "tokens drawn before a worker was lost count as the prompt",
        "workers/messages.py::Request.to_score",
        "self.$DRAWN - 1",
        "1",
        "tests/unit/workers/engine/test_prompt_logprobs.py",
    ),
    Planted(
        "a step uses the draws of a broken one",
        "workers/execution/overlapped_runner.py::LaunchedStep.land",
        "self.reads.drawn is None:",
        "False:",
        "tests/unit/workers/execution/test_overlapped_runner.py",
    ),
    Planted(
        "memory is unmapped while a step that was launched ahead may read it",
        "workers/execution/overlapped_runner.py::OverlappedRunner._launch_ahead",
        "self.newest_step = $EVENT",
        "pass",
        "tests/unit/workers/execution/test_overlapped_runner.py",
    ),
)
