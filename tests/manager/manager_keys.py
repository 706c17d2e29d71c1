"""What a manager that asks who calls is given, and what its callers show."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import trustme

from ckpt_engine.channel import ManagerStub, open_channel
from ckpt_engine.manager.service import ManagerServer
from ckpt_engine.security.client import AUTHORITY, TOKEN_FILE, ClientSecurity
from ckpt_engine.security.grants import digest_of
from ckpt_engine.security.server import ServerSecurity

GRANTS = {
    "trainer": "trainer/run-*",
    "replica": "replica/one",
    "operator": "operator",
    "viewer": "viewer",
    "holder": "holder/node-*",
}


def token(role: str) -> str:
    return f"secret-of-the-{role}-for-this-test"


@dataclass
class Keys:
    """An authority, the manager's certificate and a tokens file, on disk."""

    path: Path
    authority: trustme.CA

    def write(self, name: str, content: bytes) -> Path:
        file = self.path / name
        file.write_bytes(content)
        return file

    def issue(self, name: str, common_name: str | None = None, **fields: object) -> tuple[Path, Path]:
        issued = self.authority.issue_cert("localhost", "127.0.0.1", common_name=common_name, **fields)  # type: ignore[arg-type]
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        return self.write(f"{name}.crt", chain), self.write(f"{name}.key", issued.private_key_pem.bytes())

    @property
    def authority_file(self) -> Path:
        return self.write("ca.crt", self.authority.cert_pem.bytes())

    @property
    def tokens(self) -> Path:
        lines = [f"{grant}  {digest_of(token(role)).hex()}  # {role}" for role, grant in GRANTS.items()]
        return self.write("tokens", "\n".join(["# for the test", "", *lines]).encode())

    def with_token(self, role: str) -> ClientSecurity:
        return self.as_client({TOKEN_FILE: str(self.write(f"{role}.token", token(role).encode() + b"\n"))})

    def as_client(self, environment: dict[str, str]) -> ClientSecurity:
        return ClientSecurity.from_environment({AUTHORITY: str(self.authority_file), **environment})

    @property
    def asking(self) -> ServerSecurity:
        """Of a manager that asks for tokens."""
        return ServerSecurity(*self.issue("server"), tokens=self.tokens)

    def browser(self, server: ManagerServer, role: str = "") -> httpx.AsyncClient:
        """A client of the HTTP side, with the role's token if one is named."""
        return httpx.AsyncClient(
            base_url=f"https://{server.http_address}",
            headers={"authorization": f"Bearer {token(role)}"} if role else {},
            verify=ssl.create_default_context(cafile=str(self.authority_file)),
            trust_env=False,
            timeout=120,
        )


@contextlib.asynccontextmanager
async def calling(server: ManagerServer, security: ClientSecurity) -> AsyncIterator[ManagerStub]:
    async with open_channel(server.address, security) as channel:
        yield ManagerStub(channel)
