"""Shapes are those of the public models; random models compute finite numbers of a fair size."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from nestq.bench import shapes
from nestq.bench.shapes import SHAPES, random_dense_model, random_nested_model, shape_config
from nestq.kv_cache import head_sizes
from nestq.tensor import NestedQuantTensor
from nestq.tiled_tensor import TiledQuantTensor
from nestq.view import nest_view

# As the cards of the models say.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2-7b": 7_615_616_512,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
}
KV_HEADS_AND_SIZES = {
    "llama-2-7b": (32, 128),
    "llama-3-8b": (8, 128),
    "qwen2.5-7b": (4, 128),
    "qwen2-7b": (4, 128),
    "llama-3.2-3b": (8, 128),
    "llama-3.2-1b": (8, 64),
    "smollm2-135m": (3, 64),
}


def tiny(kind: str = "llama", **more: Any) -> PreTrainedConfig:
    settings: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        **more,
    }
    return (LlamaConfig if kind == "llama" else Qwen2Config)(**settings)


@pytest.mark.parametrize("name", SHAPES)
def test_dimensions_are_those_of_the_public_models(name: str) -> None:
    config = shape_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == PARAMETERS[name]
    assert head_sizes(config) == KV_HEADS_AND_SIZES[name]
    assert (model.model.layers[0].self_attn.q_proj.bias is not None) == name.startswith("qwen")


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"name must be one of llama-2-7b, .*, got 'gpt-2'"):
        shape_config("gpt-2")


@torch.no_grad()
def logits(model: Any, view: Any) -> Tensor:
    tokens = torch.arange(24).reshape(2, 12)
    with nest_view(view):
        return model(tokens).logits.float()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_random_models_compute(kind: str, tied: bool) -> None:
    config = tiny(kind, tie_word_embeddings=tied)
    nested = random_nested_model(config, "cpu", group_size=32, overlap=4, progress=False)
    dense = random_dense_model(config, "cpu", progress=False)

    assert config.tie_word_embeddings == tied
    assert (dense.lm_head.weight is dense.model.embed_tokens.weight) == tied
    for model in (nested, dense):
        assert not model.training
        assert model.generation_config.eos_token_id is None
        assert model.dtype == torch.bfloat16
        assert not any(p.requires_grad or p.is_meta for p in model.parameters())
        expected = type(model.model.rotary_emb)(config=config).inv_freq
        assert torch.equal(model.model.rotary_emb.inv_freq, expected)
    linears = [m for m in nested.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 2 * 7 + 1
    for linear in linears:
        assert isinstance(linear.weight, NestedQuantTensor)
        assert (linear.weight.group_size, linear.weight.overlap) == (32, 4)
    # Rows of N(0, 1 / sqrt(K)) keep the size of what a norm gives: one.
    for out in (logits(nested, "draft"), logits(nested, "target"), logits(dense, "target")):
        assert 0.8 <= out.std() <= 1.25


def test_models_of_a_seed_are_the_same() -> None:
    one, other = (random_nested_model(tiny(), "cpu", progress=False) for _ in range(2))
    assert torch.equal(logits(one, "target"), logits(other, "target"))


@pytest.mark.parametrize("kind", [NestedQuantTensor, TiledQuantTensor])
def test_blocks_of_rows_are_one_weight(
    kind: type[NestedQuantTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here for the order of a GPU, too: a last block of 8 rows and 80 columns fill no tile."""
    blocks: list[Tensor] = []

    def stored(rows: Tensor) -> Tensor:
        blocks.append(rows)
        return kind.in_own_order(NestedQuantTensor.from_hp(rows, 32))

    monkeypatch.setattr(shapes, "DRAWN_AT_ONCE", 20 * 80)
    draw = shapes._Draw(torch.device("cpu"), torch.bfloat16)
    weight = shapes._in_blocks(draw, 40, 80, stored)
    assert [len(block) for block in blocks] == [16, 16, 8]
    assert type(weight) is kind
    whole = NestedQuantTensor.from_hp(torch.cat(blocks), 32)
    assert isinstance(weight, NestedQuantTensor)
    assert torch.equal(weight.dequantize("target"), whole.dequantize("target"))
    assert torch.equal(weight.dequantize("draft"), whole.dequantize("draft"))
