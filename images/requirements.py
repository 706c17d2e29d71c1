"""Prints what pyproject.toml requires, for pip: the base, or the named extra's own (without the package itself)."""

import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extra: str = "") -> list[str]:
    """Requirements of the base or of an extra; other extras that one names are followed."""
    if not extra:
        return list(project["dependencies"])
    found = []
    for line in project["optional-dependencies"][extra]:
        if line.startswith(f"{project['name']}["):
            found += requirements(project, line.removeprefix(f"{project['name']}[").removesuffix("]"))
        else:
            found.append(line)
    return found


if __name__ == "__main__":
    print(*requirements(tomllib.loads(Path("pyproject.toml").read_text())["project"], *sys.argv[1:]), sep="\n")
