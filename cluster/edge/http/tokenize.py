"""Tokens of texts and texts of tokens over HTTP, in vLLM's shapes. All of it happens in threads."""

from fastapi import FastAPI
from starlette.responses import Response

from tidemill.cluster.edge.chat.request.request_builder import check_tokens
from tidemill.cluster.edge.chat.text import text_of
from tidemill.cluster.edge.http.replies import large_json
from tidemill.cluster.edge.requests.bodies import DetokenizeBody, TokenizeBody
from tidemill.cluster.edge.requests.models import EdgeModels


def add_token_routes(app: FastAPI, models: EdgeModels) -> None:
    """Add POST /tokenize and /detokenize."""

    async def tokenize(body: TokenizeBody) -> Response:
        """Return the tokens of a prompt, or of a chat as the model's template renders it."""
        model = models.find(body.model)
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

    async def detokenize(body: DetokenizeBody) -> Response:
        """Return the text of tokens, including special ones."""
        model = models.find(body.model)
        check_tokens(body.tokens, "tokens", model.served)
        return await large_json(
            {"prompt": await model.intake.in_thread(text_of, model.tokenizer, body.tokens)}
        )

    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])
