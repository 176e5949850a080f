"""A whole model computes the same logits in C++ as by the reference."""

import pytest
import small_models
import torch
from test_row_invariance import LENGTH, nest_, run

import nestq


@pytest.mark.parametrize("policy", ["kv4/kv8", "recent(3)"])
@pytest.mark.parametrize("view", ["target", "draft"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_the_reference(dtype: torch.dtype, view: str, policy: str) -> None:
    model = nest_(small_models.build("qwen2", hidden_size=144, dtype=dtype))
    ids = small_models.tokens(model, batch=2, length=LENGTH)
    logits = run(model, ids, [4, 1, 6], view, policy)
    nestq.select_implementation("reference")
    try:
        expected = run(model, ids, [4, 1, 6], view, policy)
    finally:
        nestq.select_implementation("kernels")
    assert torch.equal(logits, expected)
    assert logits.isfinite().all()
