"""The supervisor's part of joining: it makes tokens, signs certificates and revokes them, journal first."""

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256

from tidemill.cluster.messages import JoinAnswer, JoinRequest, MembersAnswer, MemberStatus
from tidemill.cluster.orders import EdgeOrder, ListEdges, MakeToken, RevokeEdge
from tidemill.cluster.processes.joining.authority import Authority, key_of_request
from tidemill.cluster.processes.joining.members import JoiningEdge, JoinRefused, Members
from tidemill.cluster.processes.joining.token import Token
from tidemill.workers.messages import RequestError

Write = Callable[[Callable[[Members], Members]], Members]
"""Applies a change to the members in the journal and returns them, when they are stored. Raises what the
change raises, and Fenced."""


class Registry:
    def __init__(
        self,
        write: Write,
        authority: Callable[[], Authority | None],
        unix_time_s: Callable[[], float],
        join_address: Callable[[], Awaitable[str]],
        routers: Callable[[], Awaitable[tuple[str, ...]]],
    ) -> None:
        """`authority` reads its files, and raises AuthorityError."""
        self._write = write
        self._authority = authority
        self._unix_time_s = unix_time_s
        self._join_address = join_address
        self._routers = routers

    async def carry_out(self, order: EdgeOrder) -> MembersAnswer:
        """Carry out an order. A revoked certificate is in the journal then. Raises RequestError."""
        now_s, token, join = self._unix_time_s(), "", ""
        match order:
            case MakeToken(name, life_s):
                authority = await asyncio.to_thread(self._authority)
                if authority is None:
                    raise RequestError(
                        "this cluster has no authority to sign with: start it with --cluster-ssl-ca-keyfile",
                        status=409,
                    )
                made = Token.new(authority.fingerprint)
                digest = sha256(made.secret.encode()).hexdigest()
                member = JoiningEdge(token=made.name, secret_sha256=digest, until_s=now_s + life_s)
                members = await self._changed(lambda members: members.with_token(name, member, now_s))
                token, join = str(made), await self._join_address()
            case RevokeEdge(name):
                members = await self._changed(lambda members: members.without(name, now_s))
            case ListEdges():
                members = await self._changed(lambda members: members)
        return MembersAnswer(edges=statuses(members, now_s), token=token, join=join)

    async def join(self, request: JoinRequest) -> JoinAnswer:
        """Return a certificate for an edge with a token, or a new one for an edge with a certificate."""
        try:
            key_sha256 = key_of_request(request.request)
            authority = await asyncio.to_thread(self._authority)
            if authority is None:
                raise JoinRefused("this cluster admits no edges by tokens any more")
            now_s = self._unix_time_s()
            name = ""

            def admit(members: Members) -> Members:
                nonlocal name
                if request.token:
                    name, members = members.admitted(request.token, request.secret, key_sha256, now_s)
                else:
                    name = members.renewing(request.serial, key_sha256)
                return members

            await self._changed(admit)
            signed = await asyncio.to_thread(authority.sign, request.request, name, now_s)

            def certify(members: Members) -> Members:
                if members.edges[name].revoked:
                    raise JoinRefused(f"{name} was revoked")
                return members.certified(name, signed.serial, signed.until_s, now_s)

            await self._changed(certify)
        except JoinRefused as error:
            return JoinAnswer(refusal=str(error))
        return JoinAnswer(
            ca=authority.certificate, certificate=signed.certificate, routers=await self._routers()
        )

    async def _changed(self, change: Callable[[Members], Members]) -> Members:
        return await asyncio.to_thread(self._write, change)


def statuses(members: Members, now_s: float) -> tuple[MemberStatus, ...]:
    """Return the edges, and the revoked certificates of none of them."""
    rows: list[MemberStatus] = []
    known: set[str] = set()
    for name, member in sorted(members.edges.items()):
        known.update(member.serials)
        if member.revoked:
            state = "revoked"
        elif max((0.0, *member.serials.values())) > now_s:
            state = "joined"
        else:
            state = "waits" if member.until_s > now_s and not member.key_sha256 else "expired"
        rows.append(
            MemberStatus(name=name, state=state, serials=member.serials, token_until_s=member.until_s)
        )
    for serial, until_s in sorted(members.revoked.items()):
        if serial not in known:
            rows.append(MemberStatus(name="", state="revoked", serials={serial: until_s}, token_until_s=0.0))
    return tuple(rows)
