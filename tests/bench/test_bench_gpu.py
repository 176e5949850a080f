"""Measuring on a GPU: graphs are replayed at the context, and the dense engine is right."""

import json
import math
from pathlib import Path

import pytest
import small_models
import torch

from nestq import cli
from nestq.attention import nested_attention_implementation
from nestq.bench.acceptance import Acceptance
from nestq.bench.energy import EnergyMeter
from nestq.bench.measure import Case, Decoder, measure
from nestq.bench.shapes import random_dense_model, random_nested_model
from nestq.dense_kv_cache import DenseKVCache
from nestq.speculative.round import NestedForward
from nestq.tiled_tensor import TiledQuantTensor

pytestmark = pytest.mark.gpu

ROUNDS = 20


def test_random_models_are_made_on_the_device() -> None:
    config = small_models.build("llama-gqa").config
    for model in (
        random_nested_model(config, "cuda", progress=False),
        random_dense_model(config, "cuda", progress=False),
    ):
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {
            "cuda"
        }
    nested = random_nested_model(config, "cuda", progress=False)
    assert isinstance(nested.lm_head.weight, TiledQuantTensor)


def test_synthetic_rounds_in_a_graph_draw_anew() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = random_nested_model(small_models.build("llama-gqa").config, device, progress=False)
    batch, slot = 128, 0.8
    result = measure(
        Decoder("small", "random", model, model),
        Case("speculative", 300, batch, 4, "kv4/kv8"),
        Acceptance.synthetic(slot, 4),
        ROUNDS,
        EnergyMeter(device),
    )
    bound = math.sqrt(math.log(2 / 1e-6) / (2 * batch * (ROUNDS + 1)))
    assert result.drawn_slot_acceptance == pytest.approx(slot, abs=bound)
    assert result.draft is not None
    assert result.verification is not None
    assert 0 < result.draft.milliseconds < result.round.milliseconds
    assert result.peak_bytes is not None


@torch.no_grad()
def test_the_dense_engine_computes_what_it_does_on_a_cpu() -> None:
    model = small_models.build("llama-gqa", dtype=torch.bfloat16)
    tokens = small_models.tokens(model, 2, 20)
    logits = []
    for device in ("cpu", "cuda"):
        model.to(device)
        cache = DenseKVCache(model.config, 32, 2, device)
        pads = torch.tensor([[0], [3]], device=device)
        forward = NestedForward(model, model, cache, pads)  # type: ignore[arg-type]
        columns = torch.arange(20, device=device)
        with nested_attention_implementation(model):
            parts = [
                forward("target", part.to(device), column)
                for part, column in zip(
                    tokens.split((14, 5, 1), 1), columns.split((14, 5, 1)), strict=True
                )
            ]
        logits.append(torch.cat(parts, 1).float().cpu())
    theirs, ours = (x[:, 3:] for x in logits)  # what a pad computes is not used
    assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def test_the_command_on_a_gpu(tmp_path: Path) -> None:
    result = tmp_path / "speed.json"
    arguments = ["bench", "smollm2-135m", "--device", "cuda", "--rounds", "5"]
    arguments += ["--contexts", "300", "--synthetic-acceptance", "0.952", "--json", str(result)]
    assert cli.main(arguments) == 0
    entries = json.loads(result.read_text(encoding="utf-8"))["measurements"]
    assert len(entries) == 6
    assert all(
        0 < step["share_of_bandwidth"] < 1.1 for e in entries for step in e["steps"].values()
    )
