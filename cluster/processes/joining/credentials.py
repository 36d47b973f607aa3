"""An edge's side of joining: it makes a key, gets a certificate by a token, keeps both, and renews it.

CACHE/joined/TOKEN/     one folder for each token, which only this user can read
  key.pem               made here, and never sent
  cert.pem, ca.pem      the certificate, and that of the authority whose fingerprint the token has
  routers               the addresses of routers
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tidemill.cluster.messages import JoinAnswer, JoinRequest
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.processes.joining.authority import fingerprints, new_key, request_of, validity
from tidemill.cluster.processes.joining.exchange import ask
from tidemill.cluster.processes.joining.members import JoinRefused
from tidemill.cluster.processes.joining.token import Token
from tidemill.cluster.rpc.channels import read_pem
from tidemill.kvstore.periodic import every
from tidemill.workers.messages import Unserved

RETRY_S = 1.0
REPORT_S = 10.0
RENEW_AT = 2 / 3
"""The part of a certificate's life after which it is renewed."""

RENEW_RETRY_S_MAX = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The files of an edge with this token, which joins at these addresses."""

    addresses: tuple[str, ...]
    token: Token
    folder: Path
    unix_time_s: Callable[[], float]

    @property
    def tls(self) -> MutualTls:
        return MutualTls(
            certificate=self.folder / "cert.pem", key=self.folder / "key.pem", ca=self.folder / "ca.pem"
        )

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple((self.folder / "routers").read_text().split())

    async def join(self) -> None:
        """Get a certificate, unless one is here that is still valid; wait while the cluster is away. Raises
        JoinRefused."""
        self._make_key()
        if self._is_valid():
            return
        reported_s = -REPORT_S
        clock_s = asyncio.get_running_loop().time
        while True:
            for address in self.addresses:
                try:
                    self._keep(await self._by_token(address))
                except (OSError, Unserved) as error:
                    if clock_s() - reported_s >= REPORT_S:
                        log.warning("waiting for the cluster: %s does not answer: %s", address, error)
                        reported_s = clock_s()
                else:
                    return
            await asyncio.sleep(RETRY_S)

    async def renew(self) -> None:
        """Renew the certificate before its end, again and again. Raises JoinRefused when it may not."""
        await every(RETRY_S, self._renew, "certificate", fatal=(JoinRefused,))

    async def _renew(self) -> None:
        """Wait until the certificate is to be renewed, and try once at each address."""
        begin_s, end_s = validity(read_pem(self.tls.certificate))
        life_s = end_s - begin_s
        await asyncio.sleep(max(0.0, begin_s + RENEW_AT * life_s - self.unix_time_s()))
        for address in self.addresses:
            request = JoinRequest(request=request_of(read_pem(self.tls.key)))
            try:
                self._keep(await ask(address, self.tls.client(), request))
            except (OSError, Unserved) as error:
                log.warning("the certificate of this edge is not renewed yet: %s: %s", address, error)
            else:
                log.info("the certificate of this edge is renewed")
                return
        await asyncio.sleep(min(RENEW_RETRY_S_MAX, life_s / 20))

    async def _by_token(self, address: str) -> JoinAnswer:
        """Ask for the authority, and send the token only if its fingerprint is right, over a connection that
        it has certified."""
        public = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        public.check_hostname = False
        public.verify_mode = ssl.CERT_NONE
        try:
            known = fingerprints((await ask(address, public, JoinRequest())).ca)
            authority = known.get(self.token.fingerprint)
        except ValueError:
            authority = None
        if authority is None:
            raise JoinRefused(
                f"the authority of the cluster at {address} is not that of the token: nothing was sent"
            )
        pinned = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        pinned.load_verify_locations(cadata=authority.decode())
        request = JoinRequest(
            request=request_of(read_pem(self.tls.key)), token=self.token.name, secret=self.token.secret
        )
        try:
            return await ask(address, pinned, request)
        except ssl.SSLCertVerificationError as error:
            raise JoinRefused(
                f"{address} has no certificate of the authority that the token names"
            ) from error

    def _keep(self, answer: JoinAnswer) -> None:
        """Write the answer. Raises JoinRefused if it is a refusal."""
        if answer.refusal:
            raise JoinRefused(answer.refusal)
        (self.folder / "routers").write_text("\n".join(answer.routers))
        for path, body in ((self.tls.ca, answer.ca), (self.tls.certificate, answer.certificate)):
            written = path.with_suffix(".new")
            written.write_bytes(body)
            written.replace(path)

    def _make_key(self) -> None:
        """Make a private key, unless one is here. Raises JoinRefused."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.tls.key.exists():
                written = self.tls.key.with_suffix(".new")
                with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                    file.write(new_key())
                written.replace(self.tls.key)
        except OSError as error:
            raise JoinRefused(
                f"{self.folder} cannot be written ({error.strerror}): set XDG_CACHE_HOME"
            ) from error

    def _is_valid(self) -> bool:
        try:
            begin_s, end_s = validity(read_pem(self.tls.certificate))
            return begin_s <= self.unix_time_s() < end_s and bool(self.routers)
        except (OSError, ValueError):
            return False
