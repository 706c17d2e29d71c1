"""Where a command's log goes and how its lines look: words, or one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from typing import Annotated, Any

import typer

from ckpt_engine.commands.choices import Level, LogForm

LogLevel = Annotated[Level, typer.Option(envvar="CKPT_ENGINE_LOG_LEVEL", help="Least level that is logged.")]
LogFormat = Annotated[LogForm, typer.Option(envvar="CKPT_ENGINE_LOG_FORMAT", help="Text, or one JSON object a line.")]

_PLACE = re.compile(r"%(?:%|[-+ #0-9.]*[a-zA-Z])")
_NAMED = re.compile(r"([A-Za-z_]\w*)=$")


class JsonLines(logging.Formatter):
    """One object a record: time (UTC), level, logger, message; each `name=%s` of the message is a field as well."""

    def __init__(self, **fields: str) -> None:
        """fields: of every line."""
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **_fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at the moment; a closed terminal is not an error."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line, or several with a traceback."""
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


def log_to_stderr(level: Level, form: LogForm, **fields: str) -> None:
    """Sends log records to standard error from now on. fields: of every JSON line."""
    handler = _Stderr()
    if form is LogForm.JSON:
        handler.setFormatter(JsonLines(**fields))
    else:
        words = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s"
        handler.setFormatter(logging.Formatter(words, "%Y-%m-%dT%H:%M:%S"))
        assert handler.formatter is not None
        handler.formatter.converter = time.gmtime
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)


def utc(seconds: float) -> str:
    """Unix seconds as 2026-01-31T12:00:00.000Z."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The arguments that follow a `name=` in the message, by that name. Numbers and texts keep their type."""
    if not isinstance(record.args, tuple) or not isinstance(record.msg, str):
        return {}
    found: dict[str, Any] = {}
    number = 0
    for place in _PLACE.finditer(record.msg):
        if place[0] == "%%":
            continue
        name = _NAMED.search(record.msg, 0, place.start())
        if name is not None and number < len(record.args):
            value = record.args[number]
            found[name[1]] = value if isinstance(value, str | int | float | bool) else str(value)
        number += 1
    return found
