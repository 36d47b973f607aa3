"""The models behind one endpoint, each with its own fleet, tokenizer and intake."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random

from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.edge.requests.intake import Intake
from tidemill.cluster.edge.requests.usage import Json
from tidemill.cluster.edge.service import ServedModel, Service
from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.orders import Order
from tidemill.workers.messages import RequestError, Unserved


@dataclass(frozen=True, slots=True)
class ServedBackend:
    """The backend of one model."""

    service: Service
    tokenizer: FolderTokenizer


@dataclass(frozen=True, slots=True)
class EdgeModel(ServedBackend):
    """One model as requests find it. Replies and metrics carry the first of its names."""

    intake: Intake

    @property
    def served(self) -> ServedModel:
        return self.service.model

    @property
    def name(self) -> str:
        return self.served.name

    def json(self, name: str | None = None) -> Json:
        """Return an entry of /v1/models under this name."""
        return {
            "id": name or self.name,
            "object": "model",
            "created": self.served.created_s,
            "owned_by": "tidemill",
            "type": "model",
            "display_name": name or self.name,
            "created_at": datetime.fromtimestamp(self.served.created_s, UTC)
            .isoformat()
            .replace("+00:00", "Z"),
            "root": self.name,
            "max_model_len": self.served.max_model_len,
            "vocab_size": self.served.vocab_size,
        }


class EdgeModels:
    """All models, by every name that clients may use."""

    def __init__(self, served: Sequence[ServedBackend], new_id: Callable[[], str], rng: Random) -> None:
        """Raises ValueError when two models have one name."""
        self._new_id = new_id
        self._rng = rng
        self.replace(served)

    def replace(self, served: Sequence[ServedBackend]) -> None:
        """Serve these models from now on. Requests that have begun keep theirs. Raises ValueError."""
        self._models = [
            EdgeModel(
                backend.service,
                backend.tokenizer,
                Intake(backend.service.model, backend.tokenizer, self._new_id, self._rng),
            )
            for backend in served
        ]
        self._by_name: dict[str, EdgeModel] = {}
        for model in self._models:
            for name in model.served.names:
                if self._by_name.setdefault(name, model) is not model:
                    raise ValueError(f"two models are called {name!r}")

    def __iter__(self) -> Iterator[EdgeModel]:
        return iter(self._models)

    def find(self, name: str | None) -> EdgeModel:
        """Return the model of this name; without a name, the only one. Raises RequestError."""
        if name is None and len(self._models) == 1:
            return self._models[0]
        known = ", ".join(repr(name) for name in self._by_name)
        if name is None:
            raise RequestError(f"model is missing: name one of {known}", param="model")
        model = self._by_name.get(name)
        if model is None:
            raise RequestError(
                f"there is no model {name!r} here: use {known}",
                param="model",
                status=404,
                code="model_not_found",
            )
        return model

    def listed(self) -> list[Json]:
        """Return the data of /v1/models: an entry per name."""
        return [model.json(name) for name, model in self._by_name.items()]

    async def fleets(self) -> dict[str, FleetStatus]:
        """Return the state of each fleet whose router answers, by model. Raises Unserved if none does."""
        found = await asyncio.gather(
            *(model.service.status() for model in self._models), return_exceptions=True
        )
        answered: dict[str, FleetStatus] = {}
        silent: list[Unserved] = []
        for model, status in zip(self._models, found, strict=True):
            match status:
                case FleetStatus():
                    answered[model.name] = status
                case Unserved():
                    silent.append(status)
                case error:
                    raise error
        if silent and not answered:
            raise silent[0]
        return answered

    async def can_answer(self) -> bool:
        """Return whether some worker generates, or would start for a request. Raises Unserved."""
        fleets = await self.fleets()
        if any(model.served.cold_start_s_max is not None for model in self._models if model.name in fleets):
            return True
        workers = [worker for status in fleets.values() for worker in status.workers]
        return any(worker.state == "ready" and worker.info.role != "prefill" for worker in workers)

    async def order(self, order: Order[None]) -> None:
        """Send an order about a worker to the fleet that knows it, because names of workers are unique.
        Raises RequestError, Unserved."""
        *others, last = self._models
        for model in others:
            try:
                return await model.service.carry_out(order)
            except RequestError as error:
                if error.status != UNKNOWN:
                    raise
        return await last.service.carry_out(order)


UNKNOWN = 404
"""The status of a fleet that has no worker of that name."""
