"""Which tensors are served narrower than they are stored, by what models keep."""

from __future__ import annotations

from ckpt_engine.core.kept import kept_dtypes, narrow_dtype

Q0, Q1, A_LOG = "layers.0.q.weight", "layers.1.q.weight", "layers.0.A_log"


def test_float32_is_served_as_what_models_keep_of_that_kind() -> None:
    kept = kept_dtypes([(Q0, "float32", "bfloat16")])
    assert kept == {"layers.#.q.weight": "bfloat16"}
    assert [narrow_dtype(name, "float32", kept) for name in (Q0, Q1, A_LOG)] == ["bfloat16", "bfloat16", "float32"]
    for dtype in ("bfloat16", "float16", "float64"):
        assert narrow_dtype(Q0, dtype, kept) == dtype


def test_nothing_is_served_otherwise_if_that_would_not_do() -> None:
    """What is kept in a dtype that does not widen to what was published is for a person to decide."""
    assert kept_dtypes([(Q0, "float32", "bfloat16"), (A_LOG, "float32", "float16")]) == {}
    assert kept_dtypes([(Q0, "bfloat16", "float16")]) == {}
    assert kept_dtypes([(Q0, "float64", "float32")]) == {}
    assert kept_dtypes([]) == {}
