"""What adapters tell the gateway of their engines, joined."""

from __future__ import annotations

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gateway.engines import Engines, GatewaySide, installed_engines
from ckpt_engine_adapters.sglang.generate import Generate
from ckpt_engine_adapters.vllm.completions import Completions


def test_a_route_has_one_dialect_whoever_speaks_it() -> None:
    class Own(Generate):
        """Another form at the same route."""

    engines = Engines({"a": GatewaySide((Generate, Completions)), "b": GatewaySide((Generate,)), "c": GatewaySide()})
    assert engines.dialects == {"/generate": Generate, "/v1/completions": Completions}
    assert engines.speakers == {"/generate": {"a", "b"}, "/v1/completions": {"a"}}
    with pytest.raises(CkptEngineError, match=r"/generate is .*Generate of engine a, b, and .*Own of c: .*uninstall"):
        Engines({"a": GatewaySide((Generate,)), "b": GatewaySide((Generate,)), "c": GatewaySide((Own,))})


def test_ours_speak_what_their_servers_have() -> None:
    engines = installed_engines()
    assert {route: set(names) for route, names in engines.speakers.items()} == {
        "/v1/completions": {"reference", "vllm"},
        "/inference/v1/generate": {"reference", "vllm"},
        "/generate": {"reference", "sglang"},
    }
    assert engines.labelling == {"reference"}
    # The reference engine has vLLM's routes, too: it is asked first.
    marks = [name for name, side in engines.sides.items() if side.mark is not None]
    assert marks.index("reference") < marks.index("vllm")
