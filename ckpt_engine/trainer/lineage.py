"""Decides which rank a process is, and which lineage its run has, so that all ranks name the same one.

A lineage is one run: versions rise within it, and a run that starts again or goes back needs a new one. Runs on the
trainer's calling thread. It may talk to the other ranks through torch.distributed, and to no other process.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from ckpt_engine.core.arguments import whole
from ckpt_engine.core.names import LINEAGE_BYTES, check_line
from ckpt_engine.core.problems import invalid

ENVIRONMENT = "CKPT_ENGINE_LINEAGE"
TORCHRUN = ("RANK", "WORLD_SIZE")
RAY_WORKER = "RAY_RAYLET_PID"
"""Set by Ray for each of its workers."""


def resolve_rank(rank: object, world_size: object, environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and number of ranks: as given, else those of torchrun (RANK and WORLD_SIZE), else those of the Slurm step
    that this process is a task of, else 0 of 1.

    Raises INVALID_ARGUMENT for one without the other, and for values that are not a rank.
    """
    if rank is None and world_size is None:
        rank, world_size = _launched(environment)
    if rank is None or world_size is None:
        raise invalid(f"rank {rank} of world_size {world_size}: give both, or neither under torchrun")
    if not (whole(rank) and whole(world_size)):
        raise invalid(
            f"rank and world_size must be ints, got {rank!r} and {world_size!r}: convert environment variables with "
            "int()"
        )
    number, ranks = int(str(rank)), int(str(world_size))
    if not 0 <= number < ranks:
        raise invalid(f"rank {number} is not in a world of {ranks}: ranks count from 0", ranks=[max(number, 0)])
    return number, ranks


def _launched(environment: Mapping[str, str]) -> tuple[int, int]:
    """Which process of those that were started together this one is, and how many they are.

    Raises INVALID_ARGUMENT if one of torchrun's variables tells of several ranks, and the other is not a number: as
    rank 0 of 1 it might publish a part of the weights as all of them. SLURM_STEP_NUM_TASKS is set for what srun starts.
    A batch script has SLURM_PROCID and SLURM_NTASKS, too, but is one process. A worker of Ray has the variables of the
    step that started Ray, whose ranks are not Ray's workers.
    """
    pairs = [TORCHRUN]
    if RAY_WORKER not in environment:
        pairs.append(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    for names in pairs:
        rank, size = (_number(environment.get(name, "")) for name in names)
        if rank is not None and size is not None:
            return rank, size
    rank, size = (_number(environment.get(name, "")) for name in TORCHRUN)
    if (rank or 0) > 0 or (size or 1) > 1:
        words = " and ".join(f"{name} is {environment.get(name) or 'not set'}" for name in TORCHRUN)
        raise invalid(f"{words}: set both to numbers, as torchrun does, or give rank and world_size")
    return 0, 1


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def resolve_lineage(lineage: str | None, rank: int, world_size: int, environment: Mapping[str, str]) -> str:
    """The lineage: as given, else CKPT_ENGINE_LINEAGE, else the elastic run's id, else a random one.

    With several ranks a random name is rank 0's, broadcast over torch.distributed's default group. That is a collective
    call; the group must be initialised with as many ranks. The elastic run's id gets the number of the restart
    appended, since a restarted run goes back. torchrun's "none" is not an id.

    Raises CkptEngineError (INVALID_ARGUMENT) if the ranks have no way to agree, or the name is empty or too long.
    """
    if lineage is None:
        lineage = environment.get(ENVIRONMENT) or _elastic(environment)
    if lineage is None:
        fresh = f"run-{secrets.token_hex(4)}"
        lineage = fresh if world_size == 1 else _broadcast(fresh, rank, world_size)
    if not isinstance(lineage, str):
        raise invalid(f"a lineage's name must be a str, got {lineage!r}")
    check_line("a lineage's name", lineage, LINEAGE_BYTES)
    return lineage


def fresh_lineage(rank: int, world_size: int, environment: Mapping[str, str]) -> str | None:
    """A name that no earlier start had: the elastic run's id (or "run") and a random ending, chosen by rank 0.

    None: CKPT_ENGINE_LINEAGE names the lineage, or several ranks have no default group of torch.distributed to agree
    in. Then `resolve_lineage` decides, or raises and names what is missing.
    """
    if environment.get(ENVIRONMENT):
        return None
    fresh = f"{_elastic(environment) or 'run'}-{secrets.token_hex(4)}"
    if world_size == 1:
        return fresh
    return _broadcast(fresh, rank, world_size) if _have_group(world_size) else None


def _elastic(environment: Mapping[str, str]) -> str | None:
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    if name == "none":
        return None
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return name if restarts == "0" else f"{name}-restart-{restarts}"


def _broadcast(fresh: str, rank: int, world_size: int) -> str:
    import torch
    import torch.distributed as dist

    if not _have_group(world_size):
        raise invalid(
            f"{world_size} ranks must name one lineage: pass the same lineage= to each Trainer, set {ENVIRONMENT} for "
            f"all of them, or initialise torch.distributed with {world_size} ranks first",
            ranks=[rank],
        )
    if dist.get_rank() != rank:
        raise invalid(f"rank={rank} was given, but torch.distributed says rank {dist.get_rank()}", ranks=[rank])
    on_gpu_only = "nccl" in dist.get_backend() and "gloo" not in dist.get_backend()
    # As bytes in a tensor: the object collectives of torch pickle.
    name = torch.zeros(len(fresh), dtype=torch.uint8, device="cuda" if on_gpu_only else "cpu")
    if rank == 0:
        name.copy_(torch.tensor(list(fresh.encode()), dtype=torch.uint8))
    dist.broadcast(name, src=0)
    return bytes(name.tolist()).decode()


def _have_group(world_size: int) -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size
