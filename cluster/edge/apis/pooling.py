"""Embeddings in OpenAI's shape, rerank in Jina's and Cohere's, and vLLM's score."""

import asyncio
import math
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidemill.cluster.edge.apis.json_bytes import large_json
from tidemill.cluster.edge.apis.pooling_body import (
    EmbeddingBody,
    PairsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from tidemill.cluster.edge.apis.reply import Reply, Whole
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.caller import Caller
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.usage import Json, UsageCounter
from tidemill.workers.messages import Pooling, RequestError

Vector: TypeAlias = "NDArray[np.float32]"
Vectors = Sequence[Vector]


async def embeddings(edge: EdgeContext, model: EdgeModel, body: EmbeddingBody, caller: Caller) -> Reply:
    """Return an embedding for each input: the model's hidden state after it."""

    def data(pooling: Pooling, vectors: Vectors) -> Json:
        found = (embedding(vector, body, pooling, body.dimensions) for vector in vectors)
        rows = [_written(vector, body.encoding_format) for vector in found]
        listed = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
        return {"object": "list", "created": int(edge.sources.unix_time_s()), "data": listed}

    return await _reply(edge, model, body, caller, "embeddings", data)


async def rerank(edge: EdgeContext, model: EdgeModel, body: RerankBody, caller: Caller) -> Reply:
    """Return documents by their relevance to a query, the best first."""

    def results(pooling: Pooling, vectors: Vectors) -> Json:
        scores = relevance(body, pooling, vectors)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        texts = {index: {"document": {"text": body.documents[index]}} for index in ranked}
        shown = texts if body.return_documents else {}
        return {
            "results": [
                {"index": index, "relevance_score": scores[index], **shown.get(index, {})} for index in ranked
            ]
        }

    return await _reply(edge, model, body, caller, "rerank", results)


async def score(edge: EdgeContext, model: EdgeModel, body: ScoreBody, caller: Caller) -> Reply:
    """Return the relevance of texts to one text, or that of as many pairs."""

    def data(pooling: Pooling, vectors: Vectors) -> Json:
        scores = relevance(body, pooling, vectors)
        listed = [{"object": "score", "index": index, "score": value} for index, value in enumerate(scores)]
        return {"object": "list", "created": int(edge.sources.unix_time_s()), "data": listed}

    return await _reply(edge, model, body, caller, "score", data)


Shape = Callable[[Pooling, Vectors], Json]
"""Makes the fields of a reply from what was pooled."""


async def _reply(
    edge: EdgeContext, model: EdgeModel, body: PoolingBody, caller: Caller, kind: str, shape: Shape
) -> Reply:
    pooling = model.served.pooling
    if pooling is None:
        raise RequestError(
            f"the model {model.name} generates text, and has no {kind}: serve it with --convert embed for "
            "embeddings, or with --convert classify for scores",
            param="model",
        )
    job = await model.intake.pooled(
        body, lambda tokenizer: body.prompts(tokenizer, model.served, pooling), caller, body.unused()
    )
    reply_id = f"{'embd' if kind == 'embeddings' else kind}-{edge.sources.new_id()}"
    tally = UsageCounter(job)

    async def whole(choices: Sequence[Sequence[Increment]]) -> bytes:
        vectors = [np.frombuffer(increment.pooled, "<f4") for (increment,) in choices]
        if not all(np.isfinite(vector).all() for vector in vectors):
            raise RequestError(
                "the model computes numbers that are not finite: see the data type of its weights", status=500
            )
        shaped = await asyncio.to_thread(shape, pooling, vectors)
        return await large_json({"id": reply_id, "model": model.name, **shaped, "usage": tally.usage()})

    writer = Whole(tally, len(job.requests), whole)
    return Reply(model=model, job=job, kind=kind, id=reply_id, writer=writer)


def embedding(vector: Vector, body: PoolingBody, pooling: Pooling, dimensions: int | None = None) -> Vector:
    """Return the first `dimensions` of a hidden state, divided by their length unless the client or the model
    wants them as they are."""
    cut = vector[:dimensions]
    if not (pooling.normalize if body.use_activation is None else body.use_activation):
        return cut
    exact = cut.astype(np.float64)
    return (exact / _length(exact)).astype(np.float32)


def relevance(body: PairsBody, pooling: Pooling, vectors: Vectors) -> list[float]:
    """Return the score of each pair: how likely "yes" is rather than "no", the probability of a label, or of
    an embedder the cosine."""
    if pooling.kind == "embed":
        exact = [vector.astype(np.float64) for vector in vectors]
        lengths = list(map(_length, exact))
        return [math.fsum(exact[a] * exact[b]) / (lengths[a] * lengths[b]) for a, b in body.pairing()[1]]
    logits = [float(vector[-1]) - (float(vector[0]) if len(vector) > 1 else 0.0) for vector in vectors]
    return logits if body.use_activation is False else list(map(_sigmoid, logits))


def _length(exact: "NDArray[np.float64]") -> float:
    """Return the length of a vector, 1 for that of zeros: the same bits on every machine."""
    return math.sqrt(math.fsum(exact * exact)) or 1.0


def _sigmoid(logit: float) -> float:
    """Return the logistic function, which keeps small probabilities apart."""
    odds = math.exp(-abs(logit))
    return (odds if logit < 0 else 1.0) / (1.0 + odds)


def _written(vector: Vector, encoding_format: str) -> object:
    if encoding_format == "base64":
        return b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
