"""What `--ledger` names: a file, or a database by its address; and what of an address people may see.

It decides which texts are which, and that no secret is shown. It does not decide whether there is such a database
(`ledger_database.py`) or file (`ledger_file.py`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckpt_engine.core.problems import invalid


def is_database(ledger: object) -> bool:
    """Whether a ledger's name is the address of a database, and not a file."""
    return isinstance(ledger, str) and ledger.startswith(("postgresql:", "postgres:"))


def ledger_of(name: str) -> str | Path:
    """What `--ledger` names: the address of a database, or a file. Raises INVALID_ARGUMENT for what was meant as a
    database and would be taken for a file of each manager's own; without repeating it, since it may have a password."""
    if is_database(name):
        return name
    if "://" in name or re.match(r"\w+\s*=", name):
        raise invalid(
            "--ledger is neither a file nor the address of a database as we read it: one begins with postgresql:// in "
            "small letters, as in postgresql://USER@HOST/DATABASE; before a file's name with = or :// put ./"
        )
    return Path(name)


def name_of(address: str) -> str:
    """A database's address for people, such as "postgresql://ckpt@db:5432/ledger", without any secret.

    Raises INVALID_ARGUMENT for an address that libpq does not read, without repeating it.
    """
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    how = "write postgresql://USER@HOST:PORT/DATABASE, with the password in PGPASSWORD or a password file"
    try:
        parts = {key: str(value) for key, value in conninfo_to_dict(address).items() if value is not None}
    except psycopg.Error:
        raise invalid(f"--ledger is not the address of a PostgreSQL database: {how}") from None
    host = parts.get("host", "")
    if "@" in host:
        raise invalid(f"--ledger has more than one '@': {how}. In an address a password's '@' is written %40")
    user = f"{parts['user']}@" if "user" in parts else ""
    hosts = [each if not each.startswith("/") else "" for each in host.split(",")]
    ports = parts.get("port", "").split(",")
    places = [
        f"{each}:{port}" if each and port else each
        for each, port in zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=False)
    ]
    return f"postgresql://{user}{','.join(places)}/{parts.get('dbname', '')}"


def secrets_of(address: str) -> list[str]:
    """What of an address, and of the environment, no message may show."""
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(address)
    found = [str(parts.get(key) or "") for key in ("password", "sslpassword")]
    found += re.findall(r"://[^/@]*:([^/@]*)@", address)  # as it was written, percent-encoded
    return [each for each in (*found, os.environ.get("PGPASSWORD", "")) if each]
