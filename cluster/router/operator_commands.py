"""The commands of operators: the workers that drain, and the roles that workers have."""

from collections.abc import Iterable

from tidemill.cluster.orders import Drain, SetRole
from tidemill.cluster.router.fleet_view import Member
from tidemill.workers.messages import RequestError, Role, WorkerId, WorkerInfo

SUBSTITUTES: dict[Role, frozenset[Role]] = {
    "prefill": frozenset[Role](("prefill",)),
    "decode": frozenset[Role](("decode", "mixed")),
    "mixed": frozenset[Role](("decode", "mixed")),
}
"""The roles that do the work of a role."""


class OperatorCommands:
    """Drains, which end with a restart of the worker, and roles, which survive it."""

    def __init__(self) -> None:
        self._drained: dict[str, WorkerId] = {}  # by name
        self._roles: dict[str, Role] = {}

    def confirm(self, info: WorkerInfo, *, draining: bool, is_new: bool) -> tuple[bool, Role | None]:
        """Answer a heartbeat with whether to drain, and with the role (None: unchanged). A restarted router
        (`is_new`: the worker is new to it) keeps a worker that drains draining."""
        if is_new and draining:
            self._drained[info.name] = info.worker
        return self._is_drained(info), self._roles.get(info.name)

    def carry_out(self, order: Drain | SetRole, members: Iterable[Member]) -> None:
        """Note what the next heartbeat of a worker gets as its answer. Raises RequestError."""
        members = list(members)
        info = _find(order.worker, members)
        match order:
            case Drain(drain=False):
                self._drained.pop(info.name, None)
            case Drain():
                if not order.force:
                    self._check_others(info, members)
                self._drained[info.name] = info.worker
            case SetRole(role=role):
                if role != "mixed" and role not in SUBSTITUTES[info.role]:
                    self._check_others(info, members)
                self._roles[info.name] = role

    def _is_drained(self, info: WorkerInfo) -> bool:
        return self._drained.get(info.name) == info.worker

    def _role(self, info: WorkerInfo) -> Role:
        return self._roles.get(info.name, info.role)

    def _check_others(self, info: WorkerInfo, members: Iterable[Member]) -> None:
        """Raise RequestError unless another worker that does not drain will do the same work."""
        for member in members:
            other = member.info
            idle = other is info or member.draining or self._is_drained(other)
            if not idle and self._role(other) in SUBSTITUTES[info.role]:
                return
        work = "prompts" if info.role == "prefill" else "streams"
        raise RequestError(
            f"{info.name} is the only worker that takes {work}: start another one first (or force the drain)",
            param="worker",
            status=409,
            code="last_of_its_kind",
        )


def _find(name: str, members: Iterable[Member]) -> WorkerInfo:
    names: list[str] = []
    for member in members:
        if member.info.name == name:
            return member.info
        names.append(member.info.name)
    known = ", ".join(sorted(names)) or "none"
    raise RequestError(f"there is no worker {name}, the workers are: {known}", param="worker", status=404)
