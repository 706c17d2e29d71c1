"""A story by its recipe, which fits on a line; and the shortest one that fails like a given one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tests.simulation.chaos import Chaos
from tests.simulation.scenario import Scenario, Slant, run_seed
from tests.simulation.shell import Faults
from tests.simulation.world import BrokenPromiseError

BAD_SECONDS = 20.0
TRIES = 120

OPERATED = frozenset({"somebody_goes_back"})
OPERATED_EVERY = 5
"""Of so many stories one has an operator who goes back to older versions. It takes copies of them to go back to, and
leaves less time for others: so it is not in every story."""


HELD = frozenset({"somebody_holds"})
HELD_EVERY = 6
"""Of so many stories one has an operator who holds replicas."""

FAR_EVERY = 4
"""Of so many stories one is on several hosts."""

POOLS_EVERY = 7
"""Of so many stories one has two pools."""

NODES_EVERY = 5
"""In one of so many stories replicas span nodes."""


EARLY_EVERY = 3
"""In one of so many stories workers have stage memory."""


@dataclass(frozen=True)
class Recipe:
    """What makes a story the same again: `str` and `parse` are each other's inverse."""

    seed: int
    crashes: bool
    seconds: float = BAD_SECONDS
    without: frozenset[str] = frozenset()

    def __str__(self) -> str:
        words = [str(self.seed), "crashes" if self.crashes else "network"]
        if self.seconds != BAD_SECONDS:
            words.append(f"seconds={self.seconds}")
        if self.without:
            words.append(f"without={','.join(sorted(self.without))}")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """From its line; a bare number is the story that the test would tell of this seed."""
        number, *words = text.split()
        recipe = cls.of(int(number))
        for word in words:
            match word.split("="):
                case ["crashes" | "network" as kind]:
                    recipe = replace(recipe, crashes=kind == "crashes")
                case ["seconds", value]:
                    recipe = replace(recipe, seconds=float(value))
                case ["without", value]:
                    recipe = replace(recipe, without=frozenset(value.split(",")))
                case _:
                    raise ValueError(f"{word!r} is not part of a recipe: {cls.__doc__}")
        return recipe

    @classmethod
    def of(cls, seed: int) -> Recipe:
        """Two of three stories kill and stop processes."""
        return cls(seed, seed % 3 != 0)

    def tell(self) -> Scenario:
        """Raises BrokenPromiseError."""
        often = OPERATED if self.seed % OPERATED_EVERY == 0 else frozenset[str]()
        often |= HELD if self.seed % HELD_EVERY == 1 else frozenset[str]()
        relays = "relays" not in self.without
        nodes = self.seed % NODES_EVERY == 1 and "nodes" not in self.without
        slant = Slant(
            without=self.without,
            often=often - self.without,
            relays=relays,
            far=relays and self.seed % FAR_EVERY == FAR_EVERY - 1 and "hosts" not in self.without,
            pools=self.seed % POOLS_EVERY == 0 and "pools" not in self.without,
            nodes=0.6 if nodes else 0.0,
            early=self.seed % EARLY_EVERY == 2 and "early" not in self.without,
            withdraws=0.0 if "withdraws" in self.without else 0.15,
        )
        return run_seed(self.seed, crashes=self.crashes, slant=slant, bad_seconds=self.seconds)


def tell(recipe: Recipe) -> Scenario:
    """Tells a story; if it fails, the error names the recipe, and the shortest one that fails in the same way."""
    try:
        return recipe.tell()
    except BrokenPromiseError as error:
        shorter, told = shortest(recipe, str(error))
        message = (
            f"{str(error).splitlines()[0]}\nreplay it: CKPT_ENGINE_SEED='{recipe}'\n"
            f"the shortest story that was found: CKPT_ENGINE_SEED='{shorter}'\n{told}"
        )
        raise BrokenPromiseError(message) from error


def shortest(recipe: Recipe, told: str) -> tuple[Recipe, str]:
    """Leaves out what can be left out while the failure stays the same in kind; with what that story tells."""
    kind = _kind(told)
    chaos = Chaos(Scenario(0, crashes=True, slant=Slant(nodes=1.0))).actions()
    names = [
        "ledger",
        "relays",
        "withdraws",
        "hosts",
        "pools",
        "nodes",
        "early",
        *sorted({action.__name__ for action in chaos}),
        *sorted(vars(Faults()).keys() - {"cuts"}),
    ]
    candidates = [replace(recipe, without=recipe.without | {name}) for name in names]
    for candidate in [replace(recipe, seconds=second) for second in (2.0, 5.0, 10.0, 15.0)] + candidates[:TRIES]:
        merged = replace(
            recipe, seconds=min(recipe.seconds, candidate.seconds), without=recipe.without | candidate.without
        )
        if merged == recipe:
            continue
        try:
            merged.tell()
        except BrokenPromiseError as error:
            if _kind(str(error)) == kind:
                recipe, told = merged, str(error)
    return recipe, told


def _kind(told: str) -> str:
    """The failure without numbers: these differ from story to story."""
    return re.sub(r"\d+", "#", told.splitlines()[0].partition(": ")[2])[:60]
