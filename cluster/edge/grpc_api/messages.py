"""Public messages: a request as the body of POST /v1/completions, and the parts of its answer."""

from collections.abc import Mapping
from typing import cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from tidemill.cluster.edge.chat.output.detokenizer import Scored
from tidemill.cluster.edge.chat.request.validation import checked
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.bodies import CompletionBody, TokenizeBody
from tidemill.cluster.edge.requests.json_body import VALUES_MAX
from tidemill.cluster.edge.requests.logprobs import LOGPROB_MIN, Piece
from tidemill.cluster.edge.requests.usage import UsageCounter
from tidemill.cluster.rpc.proto import generation_pb2 as pb
from tidemill.workers.messages import RequestError

FIELDS_MAX = 1 << 13
"""The most fields of a message and of those in it, where packed numbers are one field. More of them hold the
interpreter while protobuf parses them: 4 MiB of `logit_bias` take 0.7 s."""

FINISHES = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


def body_of(data: bytes) -> CompletionBody:
    """Return the body in the bytes of a GenerateRequest; each set field has its HTTP name. Raises
    RequestError."""
    request = pb.GenerateRequest()
    parse(request, data)
    fields = _fields(request)
    fields |= cast("dict[str, object]", fields.pop("sampling", {}))
    prompt = fields.pop("text", None)
    ids = fields.pop("token_ids", None)
    if prompt is None and ids is None:
        raise RequestError("prompt: set text, or token_ids", param="prompt")
    fields["prompt"] = prompt if ids is None else cast("dict[str, object]", ids).get("ids", [])
    if request.structured_outputs.HasField("choice"):
        fields["structured_outputs"] = {"choice": list(request.structured_outputs.choice.texts)}
    return checked(CompletionBody, fields)


def tokenize_body_of(data: bytes) -> TokenizeBody:
    """Return the body in the bytes of a TokenizeRequest. Raises RequestError."""
    request = pb.TokenizeRequest()
    parse(request, data)
    model = request.model if request.HasField("model") else None
    return checked(TokenizeBody, {"model": model, "prompt": request.text})


def parse(message: Message, data: bytes) -> None:
    """Parse a message. Raises RequestError."""
    _check_fields(data, cast("Descriptor", message.DESCRIPTOR))
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise RequestError(f"the message is no {message.DESCRIPTOR.full_name}") from None


def _check_fields(data: bytes, root: Descriptor) -> None:
    """Bound the fields of a message before it is parsed. Raises RequestError.

    What is no protobuf ends the search: the parser reads no further, and names the error.
    """
    found = 0
    within = [(0, len(data), root)]
    while within:
        at, end, kind = within.pop()
        try:
            while at < end:
                found += 1
                if found > FIELDS_MAX:
                    raise RequestError(
                        f"the message has more than {FIELDS_MAX:,} fields: send fewer, and numbers packed",
                        code="body_too_complex",
                    )
                tag, at = _varint(data, at)
                match tag & 7:
                    case 0:
                        _, at = _varint(data, at)
                    case 1:
                        at += 8
                    case 2:
                        size, at = _varint(data, at)
                        inner = kind.fields_by_number.get(tag >> 3)
                        if inner is not None and inner.message_type is not None:
                            within.append((at, min(at + size, end), inner.message_type))
                        at += size
                    case 5:
                        at += 4
                    case _:  # a group begins or ends: its fields follow
                        pass
        except IndexError:
            continue


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends. Raises IndexError."""
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError


def _fields(message: Message) -> dict[str, object]:
    """Return the set fields by name."""
    return {field.name: _value(value) for field, value in message.ListFields()}


def _value(value: object) -> object:
    match value:
        case Message():
            return _fields(value)
        case str() | int() | float():
            return value
        case Mapping():
            return dict(cast("Mapping[object, object]", value))
        case _:
            values = cast("list[object]", value)
            if len(values) > VALUES_MAX:
                raise RequestError(
                    f"a list has {len(values):,} values: send at most {VALUES_MAX:,}",
                    code="body_too_complex",
                )
            return list(values)


def grow(choice: pb.Choice, increment: Increment, piece: Piece) -> None:
    """Add an increment to a choice."""
    growth = increment.growth
    choice.index = increment.choice
    choice.text += growth.text
    choice.token_ids.extend(increment.tokens)
    choice.logprobs.extend(_logprob(score, piece) for score in growth.scored)
    if growth.finish is not None:
        choice.finish_reason = FINISHES[growth.finish]


def _logprob(scored: Scored, piece: Piece) -> pb.TokenLogprob:
    known = pb.TokenLogprob(token_id=scored.token, token=piece(scored.token))
    if scored.logprob is not None:
        known.logprob = max(scored.logprob.logprob, LOGPROB_MIN)
        known.top.extend(
            pb.TopLogprob(token_id=token, token=piece(token), logprob=max(logprob, LOGPROB_MIN))
            for token, logprob in scored.logprob.top
        )
    return known


def usage_of(tally: UsageCounter) -> pb.Usage:
    usage = tally.usage()
    details = cast("Mapping[str, int]", usage["prompt_tokens_details"])
    return pb.Usage(
        prompt_tokens=cast("int", usage["prompt_tokens"]),
        completion_tokens=cast("int", usage["completion_tokens"]),
        cached_tokens=details["cached_tokens"],
    )
