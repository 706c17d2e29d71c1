"""The values of options, for `--help`, completion and error messages. A test compares each enum with the module that
defines its meaning; this file repeats them, since help must not load those modules."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """How a replica shares its GPUs with a trainer: see docs/modes.md."""

    STANDALONE = "standalone"
    HYBRID = "hybrid"
    COLOCATED = "colocated"


class PauseMode(StrEnum):
    """What becomes of running requests: see `Trainer.update_weights`."""

    KEEP = "keep"
    ABORT = "abort"
    WAIT = "wait"
    IN_PLACE = "in_place"


class Policy(StrEnum):
    """Whether something is done: as its own rule decides (auto), always, or never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Until(StrEnum):
    """What an update's caller waits for: see docs/relays.md."""

    INSTALLED = "installed"
    HELD = "held"
    FIRST_WAVE = "first_wave"


class Strategy(StrEnum):
    """How a version is deployed: see docs/deployments.md."""

    ALL = "all"
    ROLLING = "rolling"
    CANARY = "canary"
    ALL_OR_NONE = "all_or_none"


class Newer(StrEnum):
    """What becomes of an undecided deployment when the lineage's next version comes."""

    SUPERSEDE = "supersede"
    WAIT = "wait"


class Tag(StrEnum):
    """Memory that an engine can take back by itself."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Level(StrEnum):
    """Levels of the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogForm(StrEnum):
    """Forms of the log's lines."""

    TEXT = "text"
    JSON = "json"


class TrainerMemory(StrEnum):
    """Where a trainer's weights lie."""

    GPU = "gpu"
    HOST = "host"


class GpuLink(StrEnum):
    """How GPUs of one host reach each other."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NONE = "none"


class Dtype(StrEnum):
    """What floating-point weights are served as."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
