"""How trainers, agents and commands authenticate to a manager, and verify the manager.

Everything comes from files and the environment, so that no secret stands on a command line:

    CKPT_ENGINE_AUTHORITY      certificates (PEM) that the manager's must be signed by; set: the connection is TLS
    CKPT_ENGINE_CERTIFICATE    our certificate and its key (PEM), if the manager asks for one
    CKPT_ENGINE_KEY
    CKPT_ENGINE_TOKEN_FILE     a file that holds our token; read at each start
    CKPT_ENGINE_SERVER_NAME    the name in the manager's certificate, if we dial it under another one
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grpc

from ckpt_engine.core.problems import invalid
from ckpt_engine.security.grants import TOKEN_CHARACTERS

AUTHORITY, CERTIFICATE, KEY = "CKPT_ENGINE_AUTHORITY", "CKPT_ENGINE_CERTIFICATE", "CKPT_ENGINE_KEY"
TOKEN_FILE, SERVER_NAME = "CKPT_ENGINE_TOKEN_FILE", "CKPT_ENGINE_SERVER_NAME"

log = logging.getLogger("ckpt_engine")


@dataclass(frozen=True)
class ClientSecurity:
    """Credentials of a client. None set: plain connections, which a manager accepts on loopback only."""

    authority: bytes = b""
    certificate: bytes = b""
    key: bytes = b""
    token: str = ""
    server_name: str = ""

    def __repr__(self) -> str:
        return f"ClientSecurity(tls={bool(self.authority)}, certificate={bool(self.certificate)}, token=***)"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ClientSecurity:
        """Reads the files that the environment names. Raises INVALID_ARGUMENT, naming the variable, for files that
        cannot be read and for half of a pair."""
        authority, certificate, key, token = (
            _read(environment, name) for name in (AUTHORITY, CERTIFICATE, KEY, TOKEN_FILE)
        )
        if bool(certificate) != bool(key):
            raise invalid(f"{CERTIFICATE} and {KEY} belong together: set both or none")
        if (certificate or token) and not authority:
            raise invalid(f"a token or certificate is shown over TLS only: set {AUTHORITY} as well")
        try:
            words = token.decode("ascii").split()
        except UnicodeDecodeError:
            words = []
        if token and len(words) != 1:
            raise invalid(f"the file that {TOKEN_FILE} names must hold one word: the token")
        if token and len(words[0]) < TOKEN_CHARACTERS:
            raise invalid(
                f"the token that {TOKEN_FILE} names has {len(words[0])} characters, at least {TOKEN_CHARACTERS} random "
                "ones are needed: make it with `openssl rand -hex 32`"
            )
        for name in (KEY, TOKEN_FILE):
            warn_of_readers(environment.get(name, ""), f"the file that {name} names")
        return cls(authority, certificate, key, words[0] if words else "", environment.get(SERVER_NAME, ""))

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for a channel; None: a plain one."""
        if not self.authority:
            return None
        tls = grpc.ssl_channel_credentials(self.authority, self.key or None, self.certificate or None)
        if not self.token:
            return tls
        return grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(self.token))

    def options(self) -> list[tuple[str, str]]:
        """Options of a channel with these credentials."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


@cache
def warn_of_readers(path: str, what: str) -> None:
    """Warns, once, of a secret that every user of this machine can read.

    ssh refuses such a key. But Kubernetes mounts secrets this way by default, into containers with one user, where a
    refusal would only break a working setup.
    """
    try:
        mode = os.stat(path).st_mode if path else 0
    except OSError:
        return
    if mode & stat.S_IROTH:
        log.warning("%s, %s, can be read by every user of this machine: chmod 600 %s", what, path, path)


def _read(environment: Mapping[str, str], name: str) -> bytes:
    path = environment.get(name, "")
    if not path:
        return b""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise invalid(f"{name} names {path}, which cannot be read: {error.strerror}") from error
    if not content.strip():
        raise invalid(f"{name} names {path}, which is empty")
    return content
