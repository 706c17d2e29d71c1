"""Regenerates ckpt_engine/v1 from proto/: `python proto/generate.py [OUTPUT_ROOT]` (default: the repository)."""

import sys
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent


def generate(output_root: Path) -> None:
    """Writes messages, their type stubs and the manager's service stubs below ``output_root``."""
    import grpc_tools

    well_known = str(Path(grpc_tools.__file__).parent / "_proto")
    include = [f"-I{PROTO}", f"-I{well_known}"]
    sources = sorted(str(path) for path in (PROTO / "ckpt_engine" / "v1").glob("*.proto"))
    service = [source for source in sources if source.endswith("manager.proto")]
    messages = ["protoc", *include, f"--python_out={output_root}", f"--pyi_out={output_root}", *sources]
    services = ["protoc", *include, f"--grpc_python_out={output_root}", *service]
    for command in (messages, services):
        if protoc.main(command) != 0:
            raise SystemExit(f"protoc failed: {' '.join(command)}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else PROTO.parent)
