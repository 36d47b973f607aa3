"""The orders of operators as data, and their answers. Every layer has one `carry_out(order) -> answer`.

    CLI ── HTTP ──> edge ── gRPC ──> router ─────────── Ray ──> supervisor
                                     SetBudget                  Scale, Roles, Reset
                                     Drain, SetRole             ListEdges, MakeToken, RevokeEdge

A new order is a class here, a `case` where it is carried out, and a row of the CLI. A refusal is a
RequestError, which travels as the Refused of an Answer.
"""

from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, get_args

from tidemill.cluster.messages import MembersAnswer, RoleScale
from tidemill.workers.messages import Count, Finite, RequestError, Role

AnswerT = TypeVar("AnswerT")


class Order(Generic[AnswerT]):
    """An order with answers of this type."""


@dataclass(frozen=True, slots=True)
class SetBudget(Order[None]):
    """Give a worker a budget; None leaves it to the memory broker."""

    worker: str
    budget_bytes: Count | None


@dataclass(frozen=True, slots=True)
class Drain(Order[None]):
    """Let a worker hand its work over, or take work again; with `force` also if no other does its work."""

    worker: str
    drain: bool = True
    force: bool = False


@dataclass(frozen=True, slots=True)
class SetRole(Order[None]):
    """Give a worker another role."""

    worker: str
    role: Role


@dataclass(frozen=True, slots=True)
class Scale(Order[str | None]):
    """Set the number of workers per role. With `pending`, workers that the cluster cannot schedule wait, and
    the answer is what it lacks."""

    counts: dict[Role, Count]
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Roles(Order[tuple[RoleScale, ...]]):
    """Return the state of each role."""


@dataclass(frozen=True, slots=True)
class Reset(Order[int]):
    """Reset the prefix cache, ordered at this edge. The answer is the number of resets, when all other edges
    know it."""

    edge: str


@dataclass(frozen=True, slots=True)
class ListEdges(Order[MembersAnswer]):
    """List the edges that join by a token."""


@dataclass(frozen=True, slots=True)
class MakeToken(Order[MembersAnswer]):
    """Make a token for an edge of this name, which lasts for `life_s`."""

    name: str
    life_s: Finite


@dataclass(frozen=True, slots=True)
class RevokeEdge(Order[MembersAnswer]):
    """Revoke what `name` is: an edge, or the serial of a certificate."""

    name: str


RouterOrder = SetBudget | Drain | SetRole
EdgeOrder = ListEdges | MakeToken | RevokeEdge
SupervisorOrder = Scale | Roles | Reset | EdgeOrder


@dataclass(frozen=True, slots=True)
class Refused:
    """The parts of a RequestError."""

    message: str
    param: str | None
    status: Count
    code: str | None

    @classmethod
    def of(cls, error: RequestError) -> Self:
        return cls(str(error), error.param, error.status, error.code)

    def error(self) -> RequestError:
        return RequestError(self.message, param=self.param, status=self.status, code=self.code)


@dataclass(frozen=True, slots=True)
class Answer(Generic[AnswerT]):
    """The answer to an order, unless it is refused."""

    answer: AnswerT | None = None
    refused: Refused | None = None


def answer_type(kind: type[Order[Any]]) -> Any:  # noqa: ANN401  a union is no type
    """Return the type of the answers to orders of this kind."""
    [base] = vars(kind)["__orig_bases__"]
    return get_args(base)[0]
