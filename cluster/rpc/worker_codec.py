"""Frames of the data plane as bytes: what frontends and workers say to each other, and back. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, assert_never, get_args

from google.protobuf.message import DecodeError, Message

from tidemill.cluster.rpc.proto import tidemill_pb2 as pb
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import (
    Delta,
    FinishReason,
    Grammar,
    GrammarKind,
    HandedOver,
    PagesMissing,
    Produced,
    Provenance,
    Request,
    RequestError,
    Sampling,
    Times,
    TokenLogprob,
    WorkerGone,
    WorkerId,
)


class Malformed(TidemillError):
    """Bytes from a socket that are not a message of ours."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of a stream: the life of the worker that the frontend was routed to."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Generate:
    call: int
    request: Request


@dataclass(frozen=True, slots=True)
class Produce:
    call: int
    request: Request


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Fetch what the store gets of this prompt, until that is all of it or cancelled. Answered as Produce."""

    call: int
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    call: int


ClientFrame = Hello | Generate | Produce | Prefetch | Cancel

Failure = PagesMissing | WorkerGone | RequestError
"""How a call fails at its caller."""


@dataclass(frozen=True, slots=True)
class Trial:
    """`alone`: from now on the worker runs this request and no other. Not `alone`: the trial is over, or has
    to begin again."""

    alone: bool


@dataclass(frozen=True, slots=True)
class StreamItem:
    """What a worker has for one call. Produced, a failure, and a delta with a finish end their call."""

    call: int
    body: Delta | Produced | Trial | Failure

    @property
    def last(self) -> bool:
        match self.body:
            case Trial():
                return False
            case Delta(finish=finish):
                return finish is not None
            case _:
                return True


_FINISHES: dict[FinishReason | None, pb.Finish] = {None: pb.NONE, "stop": pb.STOP, "length": pb.LENGTH}
_FINISH_REASONS: dict[int, FinishReason | None] = {number: reason for reason, number in _FINISHES.items()}
_GRAMMAR_KINDS: dict[str, GrammarKind] = {kind: kind for kind in get_args(GrammarKind)}

MessageT = TypeVar("MessageT", bound=Message)


def encode_client_frame(frame: ClientFrame) -> bytes:
    """Raises RequestError for a number or a text that cannot be sent: a seed beyond 64 bits, half a surrogate
    pair."""
    try:
        match frame:
            case Hello(worker):
                message = pb.ClientFrame(hello=pb.Hello(worker=worker))
            case Generate(call, request):
                message = pb.ClientFrame(generate=pb.Call(call=call, request=_request_to(request)))
            case Produce(call, request):
                message = pb.ClientFrame(produce=pb.Call(call=call, request=_request_to(request)))
            case Prefetch(call, request):
                message = pb.ClientFrame(prefetch=pb.Call(call=call, request=_request_to(request)))
            case Cancel(call):
                message = pb.ClientFrame(cancel=pb.Cancel(call=call))
            case _:
                assert_never(frame)
    except ValueError as error:
        raise RequestError(f"the request cannot be sent to a worker: {error}") from error
    return message.SerializeToString()


def decode_client_frame(data: bytes) -> ClientFrame:
    """Raises Malformed."""
    message = parse(pb.ClientFrame(), data)
    match message.WhichOneof("kind"):
        case "hello":
            return Hello(WorkerId(message.hello.worker))
        case "generate":
            return Generate(message.generate.call, _request_from(message.generate.request))
        case "produce":
            return Produce(message.produce.call, _request_from(message.produce.request))
        case "prefetch":
            return Prefetch(message.prefetch.call, _request_from(message.prefetch.request))
        case "cancel":
            return Cancel(message.cancel.call)
        case _:
            raise Malformed("a client frame of no known kind")


def first_frame(items: Sequence[StreamItem], most: int) -> Sequence[StreamItem]:
    """Those of `items` that go into the next frame: one at least, no more with the logprobs of prompts than
    `most`."""
    left = most
    for count, item in enumerate(items):
        left -= 1 + (len(item.body.prompt_logprobs) if isinstance(item.body, Delta) else 0)
        if left < 0:
            return items[: max(1, count)]
    return items


def encode_worker_frame(items: Sequence[StreamItem]) -> bytes:
    return pb.WorkerFrame(items=[_item_to(item) for item in items]).SerializeToString()


def decode_worker_frame(data: bytes) -> list[StreamItem]:
    """Raises Malformed."""
    return [_item_from(item) for item in parse(pb.WorkerFrame(), data).items]


def parse(message: MessageT, data: bytes) -> MessageT:
    """Fill an empty message. Raises Malformed."""
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Malformed(f"{len(data)} bytes are not a {message.DESCRIPTOR.name}: {error}") from error
    return message


def _request_to(request: Request) -> pb.Request:
    return pb.Request(
        request_id=request.request_id,
        tokens=request.tokens,
        max_new_tokens=request.max_new_tokens,
        sampling=_sampling_to(request.sampling),
        stop_token_ids=request.stop_token_ids,
        salt=request.salt,
        gap_tokens_max=request.gap_tokens_max,
        drawn=request.drawn,
        priority=request.priority,
        tenant=request.tenant,
        ttft_s_max=request.ttft_s_max,
        queue_offset_s=request.queue_offset_s,
        on_trial=request.on_trial,
        scored=request.scored,
        trace_parent=request.trace_parent,
    )


def _request_from(message: pb.Request) -> Request:
    if message.drawn > len(message.tokens):
        raise Malformed(f"{message.drawn} of {len(message.tokens)} tokens cannot have been drawn")
    return Request(
        request_id=message.request_id,
        tokens=tuple(message.tokens),
        max_new_tokens=message.max_new_tokens,
        sampling=_sampling_from(message.sampling),
        stop_token_ids=tuple(message.stop_token_ids),
        salt=message.salt,
        gap_tokens_max=message.gap_tokens_max if message.HasField("gap_tokens_max") else None,
        drawn=message.drawn,
        priority=message.priority,
        tenant=message.tenant,
        ttft_s_max=message.ttft_s_max if message.HasField("ttft_s_max") else None,
        queue_offset_s=message.queue_offset_s,
        on_trial=message.on_trial,
        scored=message.scored,
        trace_parent=message.trace_parent,
    )


def _sampling_to(sampling: Sampling) -> pb.Sampling:
    grammar = sampling.grammar
    return pb.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=_values_to(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=None if grammar is None else pb.Grammar(kind=grammar.kind, text=grammar.text),
    )


def _sampling_from(message: pb.Sampling) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=_values_from(message.logit_bias),
        min_tokens=message.min_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=_grammar_from(message.grammar) if message.HasField("grammar") else None,
    )


def _grammar_from(message: pb.Grammar) -> Grammar:
    if message.kind not in _GRAMMAR_KINDS:
        raise Malformed(f"grammar {message.kind!r} is not known")
    return Grammar(kind=_GRAMMAR_KINDS[message.kind], text=message.text)


def _values_to(values: Iterable[tuple[int, float]]) -> list[pb.TokenValue]:
    return [pb.TokenValue(token=token, value=value) for token, value in values]


def _values_from(messages: Iterable[pb.TokenValue]) -> tuple[tuple[int, float], ...]:
    return tuple((message.token, message.value) for message in messages)


def _item_to(item: StreamItem) -> pb.Item:
    match item.body:
        case Delta() as delta:
            return pb.Item(
                call=item.call,
                delta=pb.Delta(
                    tokens=delta.tokens,
                    logprobs=_logprobs_to(delta.logprobs),
                    prompt_logprobs=_logprobs_to(delta.prompt_logprobs),
                    finish=_FINISHES[delta.finish],
                    provenance=None if delta.provenance is None else _provenance_to(delta.provenance),
                ),
            )
        case Produced(depth=depth, provenance=provenance):
            return pb.Item(
                call=item.call, produced=pb.Produced(depth=depth, provenance=_provenance_to(provenance))
            )
        case Trial(alone):
            return pb.Item(call=item.call, alone=alone)
        case failure:
            return pb.Item(call=item.call, failure=_failure_to(failure))


def _item_from(message: pb.Item) -> StreamItem:
    match message.WhichOneof("kind"):
        case "delta":
            delta = message.delta
            if delta.finish not in _FINISH_REASONS:
                raise Malformed(f"finish {delta.finish} is not known")
            return StreamItem(
                message.call,
                Delta(
                    tokens=tuple(delta.tokens),
                    logprobs=_logprobs_from(delta.logprobs),
                    prompt_logprobs=_logprobs_from(delta.prompt_logprobs),
                    finish=_FINISH_REASONS[delta.finish],
                    provenance=_provenance_from(delta.provenance) if delta.HasField("provenance") else None,
                ),
            )
        case "produced":
            produced = message.produced
            return StreamItem(
                message.call,
                Produced(depth=produced.depth, provenance=_provenance_from(produced.provenance)),
            )
        case "alone":
            return StreamItem(message.call, Trial(message.alone))
        case "failure":
            return StreamItem(message.call, _failure_from(message.failure))
        case _:
            raise Malformed("an item of no known kind")


def _logprobs_to(logprobs: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [pb.TokenLogprob(logprob=logprob.logprob, top=_values_to(logprob.top)) for logprob in logprobs]


def _logprobs_from(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(message.logprob, _values_from(message.top)) for message in messages)


def _provenance_to(provenance: Provenance) -> pb.Provenance:
    times = provenance.times
    return pb.Provenance(
        reused_tokens=provenance.reused_tokens,
        fetched_tokens=provenance.fetched_tokens,
        computed_tokens=provenance.computed_tokens,
        times=pb.Times(
            waited_s=times.waited_s,
            fetched_s=times.fetched_s,
            computed_s=times.computed_s,
            stored_s=times.stored_s,
        ),
    )


def _provenance_from(message: pb.Provenance) -> Provenance:
    times = message.times
    return Provenance(
        reused_tokens=message.reused_tokens,
        fetched_tokens=message.fetched_tokens,
        computed_tokens=message.computed_tokens,
        times=Times(
            waited_s=times.waited_s,
            fetched_s=times.fetched_s,
            computed_s=times.computed_s,
            stored_s=times.stored_s,
        ),
    )


def _failure_to(failure: Failure) -> pb.Failure:
    text = str(failure).encode(errors="replace").decode()
    match failure:
        case PagesMissing():
            return pb.Failure(kind=pb.Failure.PAGES_MISSING, message=text)
        case HandedOver():
            return pb.Failure(kind=pb.Failure.HANDED_OVER, message=text)
        case WorkerGone():
            return pb.Failure(kind=pb.Failure.WORKER_GONE, message=text)
        case RequestError():
            return pb.Failure(
                kind=pb.Failure.BAD_REQUEST,
                message=text,
                param=failure.param,
                status=failure.status,
                code=failure.code,
            )


def _failure_from(message: pb.Failure) -> Failure:
    if message.kind == pb.Failure.PAGES_MISSING:
        return PagesMissing(message.message)
    if message.kind == pb.Failure.HANDED_OVER:
        return HandedOver(message.message)
    if message.kind == pb.Failure.WORKER_GONE:
        return WorkerGone(message.message)
    if message.kind == pb.Failure.BAD_REQUEST:
        return RequestError(
            message.message,
            param=message.param if message.HasField("param") else None,
            status=message.status,
            code=message.code if message.HasField("code") else None,
        )
    raise Malformed(f"failure kind {message.kind} is not known")
