"""Logprobs as the two endpoints of OpenAI have them: a list of tokens for chats, columns for completions."""

from collections.abc import Callable, Iterable, Sequence

from tidemill.workers.api.answer import Scored

Piece = Callable[[int], bytes]
"""The bytes that a token stands for: Tokenizer.piece."""

LOGPROB_MIN = -9999.0
"""JSON has no infinity; OpenAI's number for "very unlikely"."""


def chat_logprobs(scored: Iterable[Scored], piece: Piece) -> dict[str, object]:
    """choices[].logprobs of a chat."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        written = piece(token)
        return {"token": token_text(written), "logprob": _finite(logprob), "bytes": list(written)}

    content = [
        {
            **entry(one.token, one.logprob.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in one.logprob.top],
        }
        for one in scored
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(scored: Sequence[Scored], piece: Piece) -> dict[str, object]:
    """choices[].logprobs of a completion. `top_logprobs` holds the drawn token as well; `text_offset` counts
    characters of the answer."""

    def top(one: Scored) -> dict[str, float]:
        entries = {token_text(piece(one.token)): _finite(one.logprob.logprob)}
        for token, logprob in one.logprob.top:
            entries.setdefault(token_text(piece(token)), _finite(logprob))
        return entries

    return {
        "tokens": [token_text(piece(one.token)) for one in scored],
        "token_logprobs": [_finite(one.logprob.logprob) for one in scored],
        "top_logprobs": [top(one) for one in scored],
        "text_offset": [one.start for one in scored],
    }


def token_text(written: bytes) -> str:
    r"""A part of a character is written as OpenAI does: `bytes:\xe6\x97`."""
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
