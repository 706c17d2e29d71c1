"""How a manager authenticates its callers: its own certificate, an authority for theirs, digests of tokens."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ckpt_engine.core.problems import invalid
from ckpt_engine.security.client import warn_of_readers
from ckpt_engine.security.grants import Tokens


@dataclass(frozen=True)
class ServerSecurity:
    """What a server shows to its callers, and requires of them."""

    certificate: Path | None = None  # of the server (PEM file)
    key: Path | None = None  # of the certificate (PEM file)
    authority: Path | None = None  # must have signed callers' certificates; without tokens their common name is a grant
    tokens: Path | None = None  # a tokens file, see `Tokens.parse`
    insecure: bool = False  # serve other machines without authentication

    @property
    def authenticates(self) -> bool:
        """Whether callers must authenticate."""
        return self.authority is not None or self.tokens is not None

    def check(self) -> None:
        """Checks the settings. Raises INVALID_ARGUMENT for those that cannot work together and for files that cannot be
        read."""
        if (self.certificate is None) != (self.key is None):
            raise invalid("--certificate and --key belong together: give both or none")
        if self.authenticates and self.certificate is None:
            raise invalid("--client-authority and --tokens need TLS: give --certificate and --key as well")
        for path in (self.certificate, self.key, self.authority, self.tokens):
            if path is not None:
                _read(path)
        warn_of_readers(str(self.key or ""), "the file of --key")
        warn_of_readers(str(self.tokens or ""), "the file of --tokens")
        if self.certificate is not None:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.certificate, self.key)
            except ssl.SSLError as error:
                raise invalid(
                    f"{self.certificate} and {self.key} are not a certificate and its key: {error}"
                ) from error

    def known_tokens(self) -> Tokens | None:
        """The grants of the tokens file; None: there is none. Raises INVALID_ARGUMENT."""
        return None if self.tokens is None else Tokens.parse(_read(self.tokens).decode(errors="replace"))

    def credentials(self) -> grpc.ServerCredentials | None:
        """Credentials for the gRPC port; None: a plain one."""
        if self.certificate is None or self.key is None:
            return None
        return grpc.ssl_server_credentials(
            [(_read(self.key), _read(self.certificate))],
            None if self.authority is None else _read(self.authority),
            require_client_auth=self.authority is not None,
        )

    def for_uvicorn(self) -> dict[str, Any]:
        """Settings of the HTTP server. It requires a client's certificate only if there are no tokens."""
        if self.certificate is None:
            return {}
        settings: dict[str, Any] = {"ssl_certfile": self.certificate, "ssl_keyfile": self.key}
        if self.authority is not None and self.tokens is None:
            settings |= {"ssl_ca_certs": self.authority, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return settings


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}") from error
