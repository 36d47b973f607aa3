"""Offline answers equal those of the engine, from any caller, and an interrupted call leaves nothing."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

import tidemill
from tests.support.e2e.server import eventually
from tidemill import LLM, SamplingParams
from tidemill.cluster.edge.chat.request.request_builder import choice_seed
from tidemill.cluster.offline.llm import settings_of
from tidemill.cluster.offline.outputs import RequestOutput
from tidemill.workers.engine.build import build_engine
from tidemill.workers.inbox import Emit, Pause
from tidemill.workers.messages import Delta, Request, RequestError, Sampling, WorkerGone
from tidemill.workers.models.errors import ModelError
from tidemill.workers.scheduling.isolation import Notify
from tidemill.workers.settings import EngineSettings, SettingsError

EOS = 1
FACTS = "Alice keeps the key in the harbor. Tom likes tea. The map is now with Nora."
QUESTION = f"{FACTS} Where does Alice keep the key?"
PROMPTS = ["Hello", QUESTION, "Tom", "a b c d"]
CHAT = [{"role": "user", "content": QUESTION}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
LEAVING_TURNS = 1000
"""The iterations of the event loop that a cancelled answer takes to end."""

WARM = SamplingParams(temperature=1.5, max_tokens=12, seed=7, n=3, ignore_eos=True)


@pytest.fixture(scope="module")
def settings(kernel_cache: Path) -> dict[str, Any]:
    return {"memory": "16MiB", "page_size": 16, "cache_folder": kernel_cache}


@pytest.fixture(scope="module")
def llm(settings: dict[str, Any]) -> Iterator[LLM]:
    with LLM("keeper", **settings) as llm:
        yield llm


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[generated.token_ids for generated in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("opening", "part", "found"),
    [
        ([{"role": "system", "content": f"{FACTS} Be kind to all of them."}], None, True),
        ([], {}, False),  # a template shows parts as one text
        ([], {"cache_control": {"type": "ephemeral"}}, True),
    ],
    ids=["system prompt", "parts", "cache_control"],
)
def test_second_chat_of_a_family_finds_what_it_shares(
    llm: LLM,
    opening: list[dict[str, Any]],
    part: dict[str, Any] | None,
    found: bool,  # noqa: FBT001  a parameter
) -> None:
    """The grid is too wide to help."""
    text = {"type": "text", "text": f"{'Ben hides' if part else 'Nora sings'}. {FACTS} {FACTS} "}
    parts = [] if part is None else [text | part]
    questions = [
        [*parts, {"type": "text", "text": asked * 6}] for asked in ("Where is it? ", "What is Tom? ")
    ]
    (first,), (second,) = [
        llm.chat([*opening, {"role": "user", "content": asked}], GREEDY) for asked in questions
    ]
    pairs = zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)
    shared = next(depth for depth, (left, right) in enumerate(pairs) if left != right)
    assert 16 < shared < 64
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (shared // 16 * 16 if found else 0)


def marked_chat(shared: str, question: str, control: dict[str, str] | None) -> list[dict[str, Any]]:
    """A message of two parts, the first one with cache_control or not."""
    part = {"type": "text", "text": shared} | ({} if control is None else {"cache_control": control})
    return [{"role": "user", "content": [part, {"type": "text", "text": question}]}]


@pytest.mark.parametrize("hints", [{}, {"retain": 60}, {"session_id": "a"}, "cache_control"])
def test_hints_change_what_is_kept_and_no_answer(settings: dict[str, Any], hints: Any) -> None:  # noqa: ANN401
    """Eight other prompts do not fit the memory beside the first one."""
    first, *others = [[5 + (number * place) % 890 for place in range(300)] for number in range(7, 16)]
    small: dict[str, Any] = {**settings, "memory": "2MiB"}
    with LLM("keeper", **small) as llm:

        def ask() -> RequestOutput:
            if hints != "cache_control":
                return llm.generate([first], SamplingParams(temperature=0, max_tokens=4, **hints))[0]
            control = {"type": "ephemeral", "ttl": "1h"}
            return llm.chat(marked_chat(" ".join([FACTS] * 8), "Where is it?", control), GREEDY)[0]

        before = ask()
        for other in others:
            llm.generate([other], SamplingParams(max_tokens=1))
        after = ask()
    assert (after.num_cached_tokens > 0) is bool(hints)
    assert tokens_of([after]) == tokens_of([before])


def test_answers_are_the_engines_in_the_order_of_the_prompts(llm: LLM) -> None:
    engine, thread = llm._built.engine, llm._thread

    async def ask(prompt: list[int], choice: int) -> list[int]:
        """Return the answer of the engine without anything around it."""
        request = Request(
            request_id="r",
            tokens=tuple(prompt),
            max_new_tokens=WARM.max_tokens or 0,
            sampling=Sampling(temperature=1.5, seed=choice_seed(7, choice)),
        )
        async with aclosing(engine.generate(request)) as deltas:
            return [token async for delta in deltas for token in delta.tokens]

    outputs = llm.generate(PROMPTS, WARM)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [generated.index for generated in outputs[0].outputs] == [0, 1, 2]
    asked = [
        thread.run(ask(output.prompt_token_ids, choice)) for output in outputs for choice in range(WARM.n)
    ]
    assert [tokens for choices in tokens_of(outputs) for tokens in choices] == asked
    assert len({tuple(tokens) for tokens in asked}) > len(PROMPTS)


def test_chat_knows_its_facts(llm: LLM) -> None:
    (one,), (first, second) = llm.chat(CHAT, GREEDY), llm.chat([CHAT, CHAT], GREEDY)
    answer = one.outputs[0]
    assert answer.text == " Alice keeps the key in the harbor."
    assert (answer.finish_reason, answer.stop_reason, answer.token_ids[-1]) == ("stop", None, EOS)
    assert (answer.logprobs, answer.cumulative_logprob, one.prompt) == (None, None, None)
    assert first.outputs == second.outputs == one.outputs


def test_prompts_come_as_texts_or_token_ids(llm: LLM) -> None:
    prompt = "Is the map still with Nora?" * 4
    (text,) = llm.generate(prompt, GREEDY)
    tokens = text.prompt_token_ids
    for prompts in (tokens, [tokens], tuple(tokens), [prompt]):
        (output,) = llm.generate(prompts, GREEDY)
        assert output.outputs == text.outputs
        assert output.num_cached_tokens == (len(tokens) - 1) // 16 * 16, "prefixes are kept from call to call"
    assert llm.generate([]) == []


def test_answers_without_a_seed_repeat_with_the_models_seed(settings: dict[str, Any]) -> None:
    free = SamplingParams(temperature=2, max_tokens=8, ignore_eos=True)
    found: list[list[list[list[int]]]] = []
    for seed in (3, 3, 4):
        with LLM("keeper", seed=seed, **settings) as llm:
            found.append(tokens_of(llm.generate(["Tom", "Tom"], free)))
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    (whole,) = llm.chat(CHAT, GREEDY)
    token = whole.outputs[0].token_ids[2]
    changes: list[dict[str, Any]] = [
        {},
        {"max_tokens": 2},
        {"stop": ["the har"]},
        {"stop_token_ids": [token]},
        {"bad_words": ["in"]},
        {"structured_outputs": {"choice": ["tea", "coffee"]}},
    ]
    asked = [GREEDY.model_copy(update=change) for change in changes]
    same, short, cut, ended, barred, chosen = (
        output.outputs[0] for output in llm.chat([CHAT] * len(asked), asked)
    )
    assert same == whole.outputs[0]
    assert (len(short.token_ids), short.finish_reason) == (2, "length")
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (" Alice keeps the key in ", "stop", "the har")
    assert whole.outputs[0].token_ids[: len(cut.token_ids)] == cut.token_ids
    assert (ended.token_ids[-1], ended.stop_reason, len(ended.token_ids)) == (token, token, 3)
    assert " in " in same.text
    assert " in " not in barred.text
    assert chosen.text in {"tea", "coffee"}
    assert llm.load().running_rows == 0


def test_logprobs_of_a_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    (first, again) = (llm.generate("Bob is now at the mill.", params)[0] for _ in range(2))
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
    assert first.prompt_logprobs[0] is None
    for token, entries in zip(first.prompt_token_ids[1:], first.prompt_logprobs[1:], strict=True):
        assert entries is not None
        assert len(entries) in (2, 3)
        assert max(scored.logprob for scored in entries.values()) >= entries[token].logprob
    assert again.prompt_logprobs == first.prompt_logprobs
    assert again.num_cached_tokens == 0
    assert llm.generate("Bob", SamplingParams(max_tokens=1))[0].prompt_logprobs is None


def test_logprobs(llm: LLM) -> None:
    answer = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=24, logprobs=2))[0].outputs[0]
    assert answer.logprobs is not None
    chosen = [entries[token] for token, entries in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert {scored.rank for scored in chosen} == {1}
    assert chosen == [max(entries.values(), key=lambda scored: scored.logprob) for entries in answer.logprobs]
    assert {len(entries) for entries in answer.logprobs} == {2}
    assert answer.cumulative_logprob == sum(scored.logprob for scored in chosen)
    assert "".join(scored.decoded_token for scored in chosen) == f"{answer.text}<|end|>"


MISTAKES: list[tuple[object, dict[str, Any], str]] = [
    ("a", {"temperature": 3}, "temperature"),
    ("a", {"warmth": 3}, "warmth"),
    ("a", {"stop": [""]}, "stop[0]"),
    ("a", {"stop_token_ids": [10_000]}, "stop_token_ids"),
    ("a", {"cache_breakpoints": [2]}, "cache_breakpoints"),
    ("a", {"max_tokens": 10_000_000}, "prompts"),
    ("a", {"structured_outputs": {"regex": "("}}, "response_format"),
    ("", {}, "prompts"),
    ([5, 10_000], {}, "prompts"),
    ([5, "a"], {}, "prompts"),
    ("\ud800", {}, "prompts"),
    (7, {}, "prompts"),
]


@pytest.mark.parametrize(("prompt", "fields", "param"), MISTAKES)
def test_nothing_is_run_when_something_is_wrong(
    llm: LLM,
    prompt: Any,  # noqa: ANN401 - whatever a user may give
    fields: dict[str, Any],
    param: str,
) -> None:
    before = llm.load().counters.get("generated_tokens", 0)
    with pytest.raises(RequestError) as refused:
        llm.generate(["Hello", prompt], [GREEDY, SamplingParams(**fields)])
    assert refused.value.param == param
    assert llm.load().counters.get("generated_tokens", 0) == before


def test_bad_messages_and_too_few_parameters_are_named(llm: LLM) -> None:
    with pytest.raises(RequestError) as refused:
        llm.chat([{"role": "narrator", "content": "a"}], GREEDY)
    assert refused.value.param == "messages[0].role"
    with pytest.raises(RequestError, match="by themselves"):
        llm.chat(CHAT, SamplingParams(cache_breakpoints=[1]))
    with pytest.raises(RequestError, match="5 blocks with cache_control"):
        llm.chat(marked_chat("a", "b", {"type": "ephemeral"}) * 5, GREEDY)
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_bad_setting_is_named() -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"memory": "much"}, "^memory: "),
        ({"tensor_parallel_one_shot": "much"}, "^--tensor-parallel-one-shot: size"),
        ({"max_num_seqs": "many"}, "^--max-num-seqs: .* integer"),
        ({"max_num_seqs": 0}, "^--max-num-seqs is 0: set it to 1 or more"),
        ({"swap_space": 4}, "swap_space"),
        ({"kernels": "fast"}, "^--kernels is 'fast': set it to 'cpu'"),
    ]
    for wrong, text in wrongs:
        with pytest.raises(SettingsError, match=text):
            LLM("keeper", **wrong)


def test_settings_have_the_names_of_the_flags(tmp_path: Path) -> None:
    made = settings_of(tmp_path, {"memory": "3MiB", "max_num_seqs": 5, "kv_cache_dtype": "bfloat16"})
    assert isinstance(made, EngineSettings)
    given = (made.model_folder, made.memory_bytes, made.max_num_seqs, made.kv_cache_dtype)
    assert given == (tmp_path, 3 << 20, 5, "bfloat16")
    with pytest.raises(ModelError):
        build_engine(made, lambda _done, _total: None)


class Held:
    """Puts itself before an engine: after its first token each answer waits, until it is cancelled."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm._built.engine
        self._stream = self._engine.stream
        self.started = threading.Semaphore(0)
        self.ended = 0

    def __enter__(self) -> Self:
        self._engine.stream = self.stream
        return self

    def __exit__(self, *_: object) -> None:
        delattr(self._engine, "stream")

    async def stream(self, request: Request, emit: Emit[Delta], notify: Notify | None = None) -> None:
        def take(delta: Delta) -> Pause:
            emit(delta)
            self.started.release()
            return asyncio.Event().wait

        try:
            await self._stream(request, take, notify)
        finally:
            for _ in range(LEAVING_TURNS):
                await asyncio.sleep(0)
            self.ended += 1


def test_interrupt_aborts_all_of_the_call(settings: dict[str, Any]) -> None:
    def interrupt(held: Held, thread: int) -> None:
        for _ in PROMPTS:
            held.started.acquire()
        signal.pthread_kill(thread, signal.SIGINT)

    with LLM("keeper", **settings) as llm:
        before = tokens_of(llm.generate(PROMPTS, GREEDY))
        with Held(llm) as held, ThreadPoolExecutor(1) as beside:
            beside.submit(interrupt, held, threading.get_ident())
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY)
            assert held.ended == len(PROMPTS)
        load = llm.load()
        assert (load.running_rows, load.waiting_rows) == (0, 0)
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == before
        eventually(lambda: llm.load().live_bytes == 0)


def test_two_threads_call_concurrently(llm: LLM) -> None:
    alone = tokens_of(llm.generate(PROMPTS, WARM))
    meet = threading.Barrier(2)

    def ask(prompts: list[str]) -> list[list[list[int]]]:
        meet.wait()
        return tokens_of(llm.generate(prompts, WARM))

    with ThreadPoolExecutor(2) as threads:
        forward = threads.submit(ask, PROMPTS)
        backward = threads.submit(ask, PROMPTS[::-1])
    assert forward.result() == backward.result()[::-1] == alone


def threads() -> set[threading.Thread]:
    gc.collect()
    return set(threading.enumerate())


def test_close_ends_open_calls_and_leaves_no_thread(settings: dict[str, Any]) -> None:
    before = threads()
    llm = LLM("keeper", **settings)
    with Held(llm) as held, ThreadPoolExecutor(1) as beside:
        asking = beside.submit(llm.generate, "Hello", SamplingParams(structured_outputs={"regex": "a+"}))
        held.started.acquire()
        llm.close()
        with pytest.raises(WorkerGone, match="closed"):
            asking.result()
    eventually(lambda: threads() == before)
    llm.close()
    with pytest.raises(WorkerGone, match="closed"):
        llm.generate("Hello")


def test_forgotten_one_leaves_no_thread(settings: dict[str, Any]) -> None:
    before = threads()
    LLM("keeper", **settings).generate("Hello", GREEDY)
    eventually(lambda: threads() == before)


def test_broken_engine_reports_why(settings: dict[str, Any]) -> None:
    async def broken(flights_max: int) -> bool:
        raise OSError(f"the device is gone, with {flights_max} steps")

    with LLM("keeper", **settings) as llm:
        pipeline = llm._built.engine._pipeline
        pipeline.step = broken
        with pytest.raises(WorkerGone) as gone:
            llm.generate("Hello")
    assert isinstance(gone.value.__cause__, OSError)


def test_package_waits_for_no_library() -> None:
    look = "import sys, tidemill; print({'torch', 'pydantic', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"
    assert not hasattr(tidemill, "Llm")


def test_group_of_two_gives_the_same_answers(llm: LLM, settings: dict[str, Any]) -> None:
    with LLM("keeper", **settings, tensor_parallel_size=2) as group:
        outputs = group.generate(PROMPTS, WARM)
        children = psutil.Process().children()
        ranks = [child for child in children if "tidemill.workers.engine.rank_processes" in child.cmdline()]
        assert len(ranks) == 1
    assert tokens_of(outputs) == tokens_of(llm.generate(PROMPTS, WARM))
    gone, left = psutil.wait_procs(ranks, timeout=60)
    assert len(gone) == len(ranks)
    assert not left
