"""TLS between relays, from what ckpt_engine/security/ has for this process: both sides show a certificate.

The authority that signed the manager's certificate must have signed the other relay's as well. The locator identifies
the relay by its certificate's digest. It came from the manager, so the certificate needs no name.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
from collections.abc import Mapping

from ckpt_engine.core.problems import invalid, unavailable
from ckpt_engine.security.client import AUTHORITY, CERTIFICATE, KEY, ClientSecurity


def owners_context(environment: Mapping[str, str] = os.environ) -> tuple[ssl.SSLContext | None, bytes]:
    """The TLS context of the owner's side, and its certificate's digest; None: this process has no certificate.

    Raises INVALID_ARGUMENT, naming the variable, for files that cannot be read or do not belong together.
    """
    security = ClientSecurity.from_environment(environment)
    if not security.certificate:
        return None, b""
    context = _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), security, environment)
    first = security.certificate[security.certificate.index(b"-----BEGIN CERTIFICATE-----") :].decode("ascii")
    return context, digest_of(ssl.PEM_cert_to_DER_cert(first.partition("-----END CERTIFICATE-----")[0] + _END))


_END = "-----END CERTIFICATE-----\n"


def readers_context(environment: Mapping[str, str] = os.environ) -> ssl.SSLContext:
    """The TLS context of the reader's side. Raises INVALID_ARGUMENT if this process has no certificate."""
    security = ClientSecurity.from_environment(environment)
    if not security.certificate:
        raise invalid(
            f"that relay speaks TLS and wants a certificate of this one: set {AUTHORITY}, {CERTIFICATE}, {KEY}"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the locator has the certificate's digest
    return _load(context, security, environment)


def _load(context: ssl.SSLContext, security: ClientSecurity, environment: Mapping[str, str]) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=security.authority.decode("ascii"))
        context.load_cert_chain(environment[CERTIFICATE], environment[KEY])
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise invalid(f"{AUTHORITY}, {CERTIFICATE} and {KEY} cannot be used together: {error}") from error
    return context


def check_certificate(connection: ssl.SSLSocket, expected: bytes) -> None:
    """Raises UNAVAILABLE unless the other side showed the certificate with the expected digest."""
    certificate = connection.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(digest_of(certificate), expected):
        raise unavailable("the process at that address shows another certificate than the relay's, and is not asked")


def digest_of(certificate: bytes) -> bytes:
    """SHA-256 of a certificate (DER)."""
    return hashlib.sha256(certificate).digest()
