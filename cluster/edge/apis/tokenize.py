"""Tokens of texts and texts of tokens, in vLLM's shapes. All of it happens in threads."""

from tidemill.cluster.edge.apis.json_bytes import large_json
from tidemill.cluster.edge.chat.request.request_builder import check_tokens
from tidemill.cluster.edge.chat.tokenizer import text_of
from tidemill.cluster.edge.requests.bodies import DetokenizeBody, TokenizeBody
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.workers.models.model_files import read_json


async def tokenize(model: EdgeModel, body: TokenizeBody) -> bytes:
    """Return the tokens of a prompt, or of a chat as the model's template renders it."""
    tokens = await model.intake.prompt_of(body)

    def strs() -> list[str]:
        texts = {token: text_of(model.tokenizer, [token]) for token in set(tokens)}
        return [texts[token] for token in tokens]

    return await large_json(
        {
            "count": len(tokens),
            "max_model_len": model.served.max_model_len,
            "tokens": tokens,
            "token_strs": await model.intake.in_thread(strs) if body.return_token_strs else None,
        }
    )


async def tokenizer_info(model: EdgeModel) -> dict[str, object]:
    """Return the settings of a tokenizer, as they are in its folder, and its chat template in effect."""
    path = model.served.folder / "tokenizer_config.json"
    config = await model.intake.in_thread(lambda: read_json(path) if path.exists() else {})
    found: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    return found if model.tokenizer.template is None else {**found, "chat_template": model.tokenizer.template}


async def detokenize(model: EdgeModel, body: DetokenizeBody) -> bytes:
    """Return the text of tokens, including special ones."""
    check_tokens(body.tokens, "tokens", model.served)
    return await large_json({"prompt": await model.intake.in_thread(text_of, model.tokenizer, body.tokens)})
