"""Operators' commands about workers: which ones drain, and which role each one has."""

from collections.abc import Iterable

from tidemill.cluster.router.fleet_view import Member
from tidemill.workers.messages import RequestError, Role, WorkerId, WorkerInfo

DOES: dict[Role, frozenset[Role]] = {
    "prefill": frozenset[Role](("prefill",)),
    "decode": frozenset[Role](("decode", "mixed")),
    "mixed": frozenset[Role](("decode", "mixed")),
}
"""The roles that do the work of a role."""


class OperatorCommands:
    """Drains apply to one incarnation of a worker, and roles to its name: a restarted worker takes work
    again, in the same role.
    """

    def __init__(self) -> None:
        self._drained: dict[str, WorkerId] = {}  # by name
        self._roles: dict[str, Role] = {}

    def confirm(self, info: WorkerInfo, *, draining: bool, is_new: bool) -> tuple[bool, Role | None]:
        """Return the commands for a worker that reports. A restarted router leaves the worker as it is."""
        if is_new and draining:
            self._drained[info.name] = info.worker
        return self._is_drained(info), self._roles.get(info.name)

    def drain(self, name: str, members: Iterable[Member], *, drain: bool, force: bool) -> None:
        """Drain a worker, or let it take work again. Raises RequestError."""
        members = list(members)
        info = _find(name, members)
        if not drain:
            self._drained.pop(name, None)
            return
        if not force:
            self._check_others(info, members)
        self._drained[name] = info.worker

    def set_role(self, name: str, role: Role, members: Iterable[Member]) -> None:
        """Set a worker's role. Raises RequestError."""
        members = list(members)
        info = _find(name, members)
        if role != "mixed" and role not in DOES[info.role]:
            self._check_others(info, members)
        self._roles[name] = role

    def _is_drained(self, info: WorkerInfo) -> bool:
        return self._drained.get(info.name) == info.worker

    def _role(self, info: WorkerInfo) -> Role:
        return self._roles.get(info.name, info.role)

    def _check_others(self, info: WorkerInfo, members: Iterable[Member]) -> None:
        """Check that another worker does its work, not counting those that drain or change their role.
        Raises RequestError.
        """
        for member in members:
            other = member.info
            idle = other is info or member.draining or self._is_drained(other)
            if not idle and self._role(other) in DOES[info.role]:
                return
        raise RequestError(
            f"{info.name} is the only worker that takes {_work(info.role)}: start another one first"
            " (or drain it by force)",
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
    there = ", ".join(sorted(names)) or "none"
    raise RequestError(f"there is no worker {name}: there is {there}", param="worker", status=404)


def _work(role: Role) -> str:
    return "prompts" if role == "prefill" else "streams"
