"""`ckpt-engine ...` in a test's own process."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from ckpt_engine.cli import app_for


def run(*arguments: str) -> Result:
    """Standard output and error are in the result; what else is raised is raised here."""
    return CliRunner().invoke(app_for(arguments), list(arguments), catch_exceptions=False)
