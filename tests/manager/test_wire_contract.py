"""The generated code in the repository is what the wire contract generates."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "proto" / "generate.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    made = {path.name: path.read_text() for path in (tmp_path / "ckpt_engine" / "v1").iterdir()}
    kept = {path.name: path.read_text() for path in (REPOSITORY / "ckpt_engine" / "v1").glob("*_pb2*.py*")}
    assert sorted(made) == sorted(kept), "run proto/generate.py"
    assert [name for name in made if made[name] != kept[name]] == [], "run proto/generate.py"
