"""Tokens of texts and texts of tokens over HTTP, in vLLM's shapes."""

from fastapi import FastAPI

from tidemill.cluster.edge.chat.request.request_builder import check_tokens
from tidemill.cluster.edge.chat.text import text_of
from tidemill.cluster.edge.requests.bodies import DetokenizeBody, TokenizeBody
from tidemill.cluster.edge.requests.models import EdgeModels
from tidemill.cluster.edge.requests.usage import Json


def add_token_routes(app: FastAPI, models: EdgeModels) -> None:
    """Add POST /tokenize and /detokenize."""

    async def tokenize(body: TokenizeBody) -> Json:
        """Return the tokens of a prompt, or of a chat as the model's template renders it."""
        model = models.find(body.model)
        tokens = await model.intake.prompt_of(body)
        strs = [text_of(model.tokenizer, [token]) for token in tokens] if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": model.served.max_model_len,
            "tokens": tokens,
            "token_strs": strs,
        }

    async def detokenize(body: DetokenizeBody) -> Json:
        """Return the text of tokens, including special ones."""
        model = models.find(body.model)
        check_tokens(body.tokens, "tokens", model.served)
        return {"prompt": text_of(model.tokenizer, body.tokens)}

    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])
