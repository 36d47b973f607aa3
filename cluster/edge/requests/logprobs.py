"""Logprobs in the forms of OpenAI's two endpoints: a list of tokens for chats, columns for completions."""

from collections.abc import Callable, Iterable, Sequence

from tidemill.cluster.edge.chat.output.detokenizer import Scored
from tidemill.workers.messages import TokenLogprob

Piece = Callable[[int], bytes]
"""Returns the bytes that a token stands for: FolderTokenizer.piece."""

LOGPROB_MIN = -9999.0
"""JSON has no infinity; this is OpenAI's number for "very unlikely"."""


def chat_logprobs(scored: Iterable[Scored], piece: Piece) -> dict[str, object]:
    """Return choices[].logprobs of a chat."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        written = piece(token)
        return {"token": token_text(written), "logprob": _finite(logprob), "bytes": list(written)}

    content = [
        {
            **entry(score.token, score.logprob.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in score.logprob.top],
        }
        for score in scored
        if score.logprob is not None
    ]
    return {"content": content, "refusal": None}


def id_logprobs(tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    """Return choices[].logprobs of an answer in tokens, in the form of a chat, with `token_id:5` as text."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        return {"token": f"token_id:{token}", "logprob": _finite(logprob), "bytes": None}

    content = [
        {**entry(token, logprob.logprob), "top_logprobs": [entry(*other) for other in logprob.top]}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content}


def completion_logprobs(scored: Sequence[Scored], piece: Piece) -> dict[str, object]:
    """Return choices[].logprobs of a completion. `top_logprobs` includes the drawn token; `text_offset`
    counts characters of the text. The first token of a prompt has a null logprob."""

    def top(score: Scored) -> dict[str, float] | None:
        if score.logprob is None:
            return None
        entries = {token_text(piece(score.token)): _finite(score.logprob.logprob)}
        for token, logprob in score.logprob.top:
            entries.setdefault(token_text(piece(token)), _finite(logprob))
        return entries

    return {
        "tokens": [token_text(piece(score.token)) for score in scored],
        "token_logprobs": [score.logprob and _finite(score.logprob.logprob) for score in scored],
        "top_logprobs": [top(score) for score in scored],
        "text_offset": [score.start for score in scored],
    }


def prompt_logprobs(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprob], alternatives: int, piece: Piece
) -> list[object]:
    """Return prompt_logprobs as in vLLM: null for the first token, then an object by token id. `logprobs`
    start at the second token; the rank of a token outside the likeliest is unknown."""

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, object]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(piece(token))}

    found: list[object] = [None]
    for token, logprob in zip(tokens[1:], logprobs, strict=True):
        likeliest = enumerate(logprob.top[:alternatives], start=1)
        entries = {token: entry(token, logprob.logprob, None)}
        entries |= {other: entry(other, logprob, rank) for rank, (other, logprob) in likeliest}
        found.append({str(token): entry for token, entry in entries.items()})
    return found


def token_text(written: bytes) -> str:
    r"""Return a part of a character as OpenAI writes it: `bytes:\xe6\x97`."""
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
