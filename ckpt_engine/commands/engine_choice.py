"""The values of `--engine`: names of the kinds that adapters of this environment bring (engine/kinds.py). It is apart
from choices.py, so that only commands with such an option look for adapters."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from ckpt_engine.engine.kinds import engine_names

if TYPE_CHECKING:
    Engine = str
else:
    Engine = StrEnum("Engine", [(name, name) for name in engine_names()])
