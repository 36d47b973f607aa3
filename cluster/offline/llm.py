"""Answers without a server: the engine of a worker behind blocking calls, with vLLM's names.

prompts -> tokens -> Requests (all checked) -> the engine, on its own thread -> outputs in their order
"""

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Self, TypeAlias, cast

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidemill.cluster.config import problems as config
from tidemill.cluster.config.flags import FLAGS
from tidemill.cluster.edge.chat.request.hints import TTL_S, check_marks
from tidemill.cluster.edge.chat.request.messages import ChatMessage
from tidemill.cluster.edge.chat.request.params import SEED_BITS, SamplingParams, prompts_of
from tidemill.cluster.edge.chat.request.request_builder import Sender, requests_of, sampling_of, terms_of
from tidemill.cluster.edge.chat.request.structured import grammar_of
from tidemill.cluster.edge.chat.request.validation import problems_of, request_error
from tidemill.cluster.edge.chat.text import MarkedPrompt, Rendering
from tidemill.cluster.edge.chat.tokenizer import marked_prompt
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.cluster.offline.calls import PromptJob, answer_all
from tidemill.cluster.offline.engine_thread import EngineThread
from tidemill.cluster.offline.outputs import RequestOutput
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.engine.build import build_engine
from tidemill.workers.engine.rank_processes import start_ranks
from tidemill.workers.messages import RequestError, WorkerLoad
from tidemill.workers.settings import EngineSettings, SettingsError
from tidemill.workers.sources.download import download
from tidemill.workers.sources.names import local_folder, source_of

Prompt: TypeAlias = str | Sequence[int]
Chat: TypeAlias = Sequence[dict[str, Any]]
"""Messages as in OpenAI's API: {"role": ..., "content": ...}."""

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts, or one for each; None: the defaults."""

FIELDS = {"memory": "memory_bytes", "store": "store_url"}
"""Flags of `tidemill serve` that have another name among EngineSettings."""

OWN_STORE = "memory:?size=0"
"""No other process exchanges pages, so cached entries stay in the engine's own memory."""


class LLM:
    """A model in this process. Several threads may call it concurrently; prefixes are reused from call to
    call. `close`, or the end of a with block, releases everything."""

    def __init__(self, model: str | Path, *, seed: int | None = 0, **settings: object) -> None:
        """`model` is a Hugging Face folder, a repository of the hub or another place to download from, or a
        bundled model; `seed` is for answers without a seed (None: other draws in each run).

        Settings are the flags of `tidemill serve` (memory="2GiB", revision="main", max_num_seqs=8) and the
        fields of EngineSettings. Raises ModelError, SettingsError and SourceError.
        """
        made = settings_of(model, settings)
        self._tokenizer = load_tokenizer(made.model_folder)
        self._built = build_engine(made, lambda _done, _total: None, start_ranks)
        self._rng = Random(seed)  # noqa: S311 - seeds of draws are no secrets
        self._ids = count()
        self._thread = EngineThread(self._built)
        self._close = weakref.finalize(self, self._thread.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs and release everything; further calls do nothing."""
        self._close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt or several, each a text or token ids. `progress` shows a bar on a terminal.

        All prompts are checked before any runs. Raises RequestError, and WorkerGone when the engine failed
        or was closed; then, and when the call is interrupted, none of it continues.
        """
        if not isinstance(prompts, str) and not prompts:
            return []
        try:
            checked = prompts_of(prompts)
        except ValueError as error:
            raise RequestError(f"prompts: {error}", param="prompts") from error
        params = _for_each(sampling_params, len(checked))
        marked = [
            marked_prompt(self._tokenizer, prompt, prompt_params.cache_breakpoints)
            for prompt, prompt_params in zip(checked, params, strict=True)
        ]
        texts = [prompt if isinstance(prompt, str) else None for prompt in checked]
        return self._answers(texts, marked, params, progress=progress)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: Params = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template. Parts of messages may have
        cache_control, as over HTTP. Raises RequestError."""
        chats = cast("Sequence[Chat]", [messages] if messages and isinstance(messages[0], dict) else messages)
        turns = list(map(_turns_of, chats))
        marks = [
            [(index, mark.chars) for index, turn in enumerate(chat) for mark in turn.marks] for chat in turns
        ]
        prompts = [
            self._tokenizer.chat([turn.message() for turn in chat], Rendering(message_marks=marked))
            for chat, marked in zip(turns, marks, strict=True)
        ]
        params = [
            _retaining(chat_params, chat)
            for chat_params, chat in zip(_for_each(sampling_params, len(turns)), turns, strict=True)
        ]
        if any(chat_params.cache_breakpoints for chat_params in params):
            raise RequestError(
                "conversations have breakpoints by themselves: leave cache_breakpoints out",
                param="cache_breakpoints",
            )
        return self._answers([None] * len(prompts), prompts, params, progress=progress)

    def load(self) -> WorkerLoad:
        """Return the engine's present load and memory use, with its counters."""

        async def look() -> WorkerLoad:
            return self._built.engine.load()

        return self._thread.run(look())

    def _answers(
        self,
        texts: Sequence[str | None],
        prompts: Sequence[MarkedPrompt],
        params: Sequence[SamplingParams],
        *,
        progress: bool,
    ) -> list[RequestOutput]:
        jobs = [
            self._job(text, prompt, prompt_params)
            for text, prompt, prompt_params in zip(texts, prompts, params, strict=True)
        ]
        for grammar in {job.requests[0].sampling.grammar for job in jobs}:
            if grammar is not None:
                self._built.grammars.matcher(grammar)
        with _bar(sum(len(job.requests) for job in jobs), show=progress) as advance:
            return self._thread.run(answer_all(self._built.engine, self._tokenizer, jobs, advance))

    def _job(self, text: str | None, prompt: MarkedPrompt, params: SamplingParams) -> PromptJob:
        info = self._built.info
        sampling = sampling_of(
            params,
            info,
            self._tokenizer.encode_inside,
            seed=self._rng.getrandbits(SEED_BITS),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            grammar=grammar_of(params.response_format, params.structured_outputs),
        )
        terms = terms_of(params, info, sampling, max_tokens=params.max_tokens, n=params.n)
        sender = Sender(retain_s=params.retain_s(), session=params.session(""))
        requests = requests_of(terms, info, prompt, "prompts", lambda: str(next(self._ids)), sender)
        return PromptJob(requests, terms.ending, text)


def settings_of(model: str | Path, settings: dict[str, object]) -> EngineSettings:
    """Return the settings. Raises SettingsError."""
    fields = {FIELDS.get(name, name): value for name, value in settings.items()}
    revision, download_dir = fields.pop("revision", None), fields.pop("download_dir", None)
    source = source_of(
        str(model),
        None if revision is None else str(revision),
        None if download_dir is None else Path(str(download_dir)),
    )
    known = EngineSettings.__dataclass_fields__
    for name in fields.keys() - known:
        raise SettingsError(f"there is no setting {name}: use {', '.join(sorted({*FIELDS, *known}))}")
    try:
        if isinstance(size := fields.get("memory_bytes"), str):
            fields["memory_bytes"] = parse_bytes(size)
    except ValueError as error:
        raise SettingsError(f"memory: {error}") from error
    try:
        return TypeAdapter(EngineSettings).validate_python(
            {
                "store_url": OWN_STORE,
                "cache_folder": Path.home() / ".cache" / "tidemill",
                **fields,
                "model_folder": local_folder(str(model)) if source is None else download(source),
            },
            strict=False,
        )
    except ValidationError as error:
        options: dict[config.Location, str] = {
            (flag.key,): flag.option for flag in FLAGS if flag.role is None and flag.key in known
        }
        raise SettingsError(config.problems_of(error, options)[0]) from None


def _turns_of(chat: Chat) -> list[ChatMessage]:
    try:
        turns = TypeAdapter(list[ChatMessage]).validate_python(chat)
    except ValidationError as error:
        raise request_error(problems_of(error, "messages")) from None
    check_marks([mark for turn in turns for mark in turn.marks])
    return turns


def _retaining(params: SamplingParams, chat: Sequence[ChatMessage]) -> SamplingParams:
    """Return the parameters with the longest time for which a mark or `retain` retains the prompt."""
    times_s = [TTL_S[mark.control.ttl] for turn in chat for mark in turn.marks]
    return params.model_copy(update={"retain": max([*times_s, params.retain or 0.0])}) if times_s else params


def _for_each(params: Params, number: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if len(params) != number:
        raise RequestError(
            f"{len(params)} sampling_params for {number} prompts: give one for each, or one for all",
            param="sampling_params",
        )
    return params


@contextmanager
def _bar(total: int, *, show: bool) -> Generator[Callable[[], None]]:
    """Show a progress bar on stderr, if that is a terminal; yield what advances it by one answer."""
    console = Console(stderr=True)
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda: bar.advance(task)
