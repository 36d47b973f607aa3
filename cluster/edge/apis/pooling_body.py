"""The bodies of embeddings, rerank and score, and the prompts that they become."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import AliasChoices, BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema

from tidemill.cluster.edge.chat.request.hints import HintedParams
from tidemill.cluster.edge.chat.request.params import PROMPT_FORMS, Params, one_or_many, prompts_of
from tidemill.cluster.edge.chat.request.request_builder import ModelLimits
from tidemill.cluster.edge.chat.text import MarkedPrompt, Message, Rendering, check_chars
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer, marked_prompt
from tidemill.cluster.edge.requests.bodies import Body
from tidemill.workers.messages import Pooling, RequestError

INPUTS_MAX = 2048
"""The most inputs of one request, as in OpenAI's API."""

NUMBERS_MAX = 1 << 22
"""The most numbers in one reply: some 80 MB as JSON."""

PAIRS_CHARS_MAX = 16 << 20
"""The most characters of all pairs of one request, of which each has the whole query."""

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The words of Qwen3-Reranker."""

OWN = {"model", "truncate_prompt_tokens", "truncation_side", "retain", "session_id"}
EFFECTIVE = OWN | (HintedParams.model_fields.keys() - Params.model_fields.keys())
"""The fields of a generating request with an effect here."""


def _inputs(value: object) -> list[str | list[int]]:
    return _bounded(prompts_of(value))


def _bounded(inputs: list[Any]) -> list[Any]:
    if len(inputs) > INPUTS_MAX:
        raise ValueError(f"{len(inputs)} inputs in one request: send at most {INPUTS_MAX}")
    return inputs


def _texts(value: object) -> object:
    """Return documents as texts; some clients send each as an object with a `text`."""
    texts = one_or_many(value)
    if not isinstance(texts, list):
        return texts
    items = _bounded(cast("list[object]", texts))
    return [cast("dict[str, object]", item).get("text") if isinstance(item, dict) else item for item in items]


Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(_inputs),
    WithJsonSchema({"description": PROMPT_FORMS, "type": ["string", "array"]}),
]
Texts = Annotated[list[str], FailFast(), Field(min_length=1), BeforeValidator(_texts)]


class PoolingBody(Body):
    """The fields of all three."""

    use_activation: Annotated[
        bool | None, Field(description="false: embeddings as long as they come, scores as logits")
    ] = None

    @abstractmethod
    def prompts(self, tokenizer: FolderTokenizer, model: ModelLimits, pooling: Pooling) -> list[MarkedPrompt]:
        """Return the prompts to pool for. Raises RequestError."""

    def unused(self) -> tuple[str, ...]:
        """Return the fields of a generating request without an effect here."""
        return tuple(sorted(self.model_fields_set & (Body.model_fields.keys() - EFFECTIVE)))

    def _shortened(self, tokens: list[int], empty: Sequence[int], model: ModelLimits) -> list[int]:
        """Return as many tokens as the client keeps, with those at both ends that also a prompt without a
        text has. Raises RequestError."""
        kept = self.truncate_prompt_tokens
        most = model.max_model_len if kept is None or kept < 0 else kept
        if kept is None or len(tokens) <= most:
            return tokens
        if len(empty) >= most:
            raise RequestError(
                f"truncate_prompt_tokens {most} leaves nothing of a text, around which there are {len(empty)}"
                " tokens: raise it",
                param="truncate_prompt_tokens",
            )
        if self.truncation_side == "left":
            head = _common(tokens, empty)
            return tokens[:head] + tokens[len(tokens) - most + head :]
        tail = _common(tokens[::-1], empty[::-1])
        return tokens[: most - tail] + tokens[len(tokens) - tail :]

    def _plain(
        self, texts: Sequence[str | list[int]], tokenizer: FolderTokenizer, model: ModelLimits
    ) -> list[MarkedPrompt]:
        """Return each text with the tokens that the tokenizer puts around it; token ids are as they are."""
        empty = tokenizer.encode("")
        found: list[MarkedPrompt] = []
        for text in texts:
            if isinstance(text, str):
                check_chars(len(text), model.max_model_len * tokenizer.token_chars_max, "input")
            tokens = marked_prompt(tokenizer, text, ()).tokens
            found.append(MarkedPrompt(self._shortened(tokens, empty if isinstance(text, str) else (), model)))
        return found


class EmbeddingBody(PoolingBody):
    """The body of POST /v1/embeddings."""

    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "native"

    def prompts(self, tokenizer: FolderTokenizer, model: ModelLimits, pooling: Pooling) -> list[MarkedPrompt]:
        if pooling.kind != "embed":
            raise RequestError(
                "this model ranks texts and embeds none: use /v1/rerank or /v1/score, or serve it with "
                "--convert embed",
                param="model",
            )
        self._check_dimensions(pooling)
        if len(self.input) * (self.dimensions or pooling.size) > NUMBERS_MAX:
            fits = NUMBERS_MAX // (self.dimensions or pooling.size)
            raise RequestError(f"{len(self.input)} inputs: send at most {fits} to this model", param="input")
        return self._plain(self.input, tokenizer, model)

    def _check_dimensions(self, pooling: Pooling) -> None:
        wanted, allowed = self.dimensions, pooling.dimensions
        if wanted is None or wanted == pooling.size:
            return
        if allowed is None:
            raise RequestError(
                f"this model's embeddings have {pooling.size} dimensions, and are not made to be cut: leave "
                'dimensions out, or set "is_matryoshka" to true in its config.json if they are',
                param="dimensions",
            )
        if wanted > pooling.size or (allowed and wanted not in allowed):
            fits = ", ".join(map(str, allowed)) or f"1 to {pooling.size}"
            raise RequestError(f"dimensions {wanted}: this model has {fits}", param="dimensions")


class PairsBody(PoolingBody):
    """The fields of bodies with queries and documents."""

    instruction: Annotated[str | None, Field(description="what a document is judged by")] = None

    @abstractmethod
    def pairing(self) -> tuple[list[str], list[tuple[int, int]]]:
        """Return all texts, and the positions among them of each query and document. Raises RequestError."""

    def prompts(self, tokenizer: FolderTokenizer, model: ModelLimits, pooling: Pooling) -> list[MarkedPrompt]:
        texts, pairs = self.pairing()
        if pooling.kind == "embed":
            if len(texts) * pooling.size > NUMBERS_MAX:
                raise RequestError(f"send at most {NUMBERS_MAX // pooling.size} texts to this model")
            return self._plain(texts, tokenizer, model)
        most = model.max_model_len * tokenizer.token_chars_max
        found: list[MarkedPrompt] = []
        num_chars = sum(len(texts[query]) + len(texts[document]) for query, document in pairs)
        if num_chars > PAIRS_CHARS_MAX:
            raise RequestError(
                f"the pairs of query and document have {num_chars:,} characters: send at most "
                f"{PAIRS_CHARS_MAX:,}, with fewer documents at a time",
                param="documents",
            )
        for query, document in pairs:
            check_chars(len(texts[query]) + len(texts[document]), most, "documents")
            prompt = self._judged(tokenizer, texts[query], texts[document])
            if self.truncate_prompt_tokens is not None:
                empty = self._judged(tokenizer, texts[query], "").tokens
                prompt = prompt._replace(tokens=self._shortened(prompt.tokens, empty, model))
            found.append(prompt)
        return found

    def _judged(self, tokenizer: FolderTokenizer, query: str, document: str) -> MarkedPrompt:
        """Return the chat after which the model answers yes or no. All documents share what precedes them."""
        before = f"<Instruct>: {self.instruction or INSTRUCTION}\n<Query>: {query}\n<Document>:"
        messages = [Message("system", JUDGE), Message("user", f"{before} {document}")]
        how = Rendering(options={"enable_thinking": False}, message_marks=[(1, len(before))])
        return tokenizer.chat(messages, how)


class RerankBody(PairsBody):
    """The body of POST /v1/rerank."""

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] = Field(default=0, description="0: all")
    return_documents: bool = True

    def pairing(self) -> tuple[list[str], list[tuple[int, int]]]:
        texts = [self.query, *self.documents]
        return texts, [(0, index) for index in range(1, len(texts))]


class ScoreBody(PairsBody):
    """The body of POST /v1/score: a text and others, or as many as the others."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))

    def pairing(self) -> tuple[list[str], list[tuple[int, int]]]:
        count, others = len(self.text_1), len(self.text_2)
        if count not in (1, others):
            raise RequestError(
                f"text_1 has {count} texts and text_2 has {others}: send one, or as many", param="text_1"
            )
        pairs = [(index % count, count + index) for index in range(others)]
        return [*self.text_1, *self.text_2], pairs


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((index for index, (token, other) in pairs if token != other), min(len(tokens), len(others)))
