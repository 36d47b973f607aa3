"""X.509: the authority of a cluster that signs for edges, and the requests that it signs."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tidemill.cluster.processes.joining.members import JoinRefused
from tidemill.cluster.rpc.channels import read_pem
from tidemill.kvstore.errors import TidemillError

CERTIFICATE_S = 86_400.0
"""The life of an edge's certificate, which the edge renews when a third of it is left."""

SKEW_S = 300.0
"""The time by which clocks of machines may differ."""


class AuthorityError(TidemillError):
    """The files of an authority cannot be used; the message is one line with the reason."""


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate in PEM, its serial in hexadecimal digits, and its end in unix time."""

    certificate: bytes
    serial: str
    until_s: float


class Authority:
    """The key that signs certificates of edges, and its certificate among those of `ca`."""

    def __init__(self, key: Path, ca: Path) -> None:
        """Read the files. Raises AuthorityError."""
        try:
            loaded = load_pem_private_key(read_pem(key), password=None)
            authorities = fingerprints(read_pem(ca))
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise AuthorityError(f"{key} and {ca} are not a key and certificates in PEM: {error}") from error
        if not isinstance(loaded, CertificateIssuerPrivateKeyTypes):
            raise AuthorityError(f"{key}: a key of this kind signs no certificates")
        self._key = loaded
        self.fingerprint = _digest(loaded.public_key().public_bytes(Encoding.DER, _SPKI))
        if self.fingerprint not in authorities:
            raise AuthorityError(
                f"{key} is the key of no certificate in {ca}: --cluster-ssl-ca-keyfile is that of the "
                "authority in --cluster-ssl-ca-certs"
            )
        self.certificate = authorities[self.fingerprint]

    def sign(self, request: bytes, name: str, now_s: float, life_s: float = CERTIFICATE_S) -> Signed:
        """Return a certificate that admits an edge as a client, and as nothing else. `request` was checked by
        `key_of_request`."""
        issuer = x509.load_pem_x509_certificate(self.certificate)
        asked = x509.load_pem_x509_csr(request)
        now = datetime.fromtimestamp(now_s, UTC)
        until = min(now + timedelta(seconds=life_s), issuer.not_valid_after_utc)
        serial = x509.random_serial_number()
        signed = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(issuer.subject)
            .public_key(asked.public_key())
            .serial_number(serial)
            .not_valid_before(max(now - timedelta(seconds=SKEW_S), issuer.not_valid_before_utc))
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return Signed(signed.public_bytes(Encoding.PEM), f"{serial:x}", until.timestamp())


_SPKI = PublicFormat.SubjectPublicKeyInfo


def _digest(public_key: bytes) -> str:
    return sha256(public_key).hexdigest()


def fingerprints(ca: bytes) -> Mapping[str, bytes]:
    """Return the certificates of a PEM file by the SHA-256 digests of their public keys, as kubeadm has them.
    Raises ValueError."""
    return {
        _digest(known.public_key().public_bytes(Encoding.DER, _SPKI)): known.public_bytes(Encoding.PEM)
        for known in x509.load_pem_x509_certificates(ca)
    }


def key_of_request(request: bytes) -> str:
    """Return the digest of the public key of a signing request. Raises JoinRefused unless it is one for a key
    on P-256, signed by that key."""
    try:
        asked = x509.load_pem_x509_csr(request)
        public_key = asked.public_key()
        is_sound = asked.is_signature_valid
    except (ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise JoinRefused(f"the signing request cannot be read: {error}") from error
    if not is_sound or not isinstance(public_key, ec.EllipticCurvePublicKey):
        raise JoinRefused("the signing request is not signed by a key on P-256")
    if not isinstance(public_key.curve, ec.SECP256R1):
        raise JoinRefused("the signing request is not signed by a key on P-256")
    return _digest(public_key.public_bytes(Encoding.DER, _SPKI))


def new_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def request_of(key: bytes) -> bytes:
    """Return a signing request of a private key, both in PEM. Raises ValueError."""
    loaded = load_pem_private_key(key, password=None)
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ValueError("it is no key on a curve")  # noqa: TRY004 - as for a file that is none
    built = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return built.sign(loaded, hashes.SHA256()).public_bytes(Encoding.PEM)


def validity(certificate: bytes) -> tuple[float, float]:
    """Return the begin and the end of a certificate in PEM, in unix time. Raises ValueError."""
    known = x509.load_pem_x509_certificate(certificate)
    return known.not_valid_before_utc.timestamp(), known.not_valid_after_utc.timestamp()


def serial_of(certificate: bytes) -> str:
    """Return the serial of a certificate in DER, in hexadecimal digits. Raises ValueError."""
    return f"{x509.load_der_x509_certificate(certificate).serial_number:x}"
