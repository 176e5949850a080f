"""On a GPU the kernels compute what the CPU's reference does, eager, compiled and in graphs."""

import copy
from collections.abc import Iterator

import pytest
import small_models
import torch
from speculative_runs import nested_model, padded_prompts, run
from torch import Tensor
from transformers import PreTrainedModel

import nestq
from nestq import nest_view
from nestq.kv_cache import NestedKVCache

pytestmark = pytest.mark.gpu

FAMILIES = ["llama-gqa", "qwen3", "phi3"]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Kernels are the default, and stay it whatever a test selects."""
    yield
    nestq.select_implementation("kernels")


def on_gpu(family: str = "llama-gqa", dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return copy.deepcopy(nested_model(family, dtype)).cuda()


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor, view: str) -> Tensor:
    with nest_view(view):
        return model(tokens.to(model.device), use_cache=False).logits.float().cpu()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("view", ["draft", "target"])
def test_logits_are_those_of_the_reference(family: str, view: str) -> None:
    model = on_gpu(family, torch.float32)
    tokens = small_models.tokens(model, 2, 20)
    ours = logits(model, tokens, view)
    nestq.select_implementation("reference")
    theirs = logits(model, tokens, view)
    # Both quantize the same activations but for what norms and attention round differently; a
    # code that flips costs one INT8 step of one value.
    assert (ours - theirs).norm() <= 0.02 * theirs.norm()
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.95


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv", ["kv8/kv8", "kv4/kv8", "recent(4)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_speculative_tokens_are_those_of_the_target(
    family: str, kv: str, dtype: torch.dtype
) -> None:
    model = on_gpu(family, dtype)
    tokens, mask = padded_prompts(model, [0, 3, 7], 12)
    inputs = {"attention_mask": mask.cuda(), "kv": kv, "max_new_tokens": 40}
    expected = run(model, tokens.cuda(), 0, **inputs).sequences
    for gamma in (1, 4, 7):
        assert torch.equal(run(model, tokens.cuda(), gamma, **inputs).sequences, expected)


def test_rows_of_a_batch_are_the_prompts_alone() -> None:
    model = on_gpu()
    tokens, mask = padded_prompts(model, [0, 5], 12)
    batch = run(model, tokens.cuda(), 3, attention_mask=mask.cuda()).sequences
    for row, pads in enumerate((0, 5)):
        alone = run(model, tokens[row : row + 1, pads:].cuda(), 3).sequences
        assert torch.equal(batch[row, pads:], alone[0])


def test_steps_of_one_row_and_blocks_of_five_give_the_same_bits() -> None:
    model = on_gpu()
    tokens = small_models.tokens(model, 1, 15).cuda()
    steps = [
        cached_logits(model, part) for part in ([tokens], tokens.split(1, 1), tokens.split(5, 1))
    ]
    assert torch.equal(steps[0], steps[1])
    assert torch.equal(steps[0], steps[2])


@torch.no_grad()
def cached_logits(model: PreTrainedModel, parts: list[Tensor]) -> Tensor:
    """Logits of the target, the tokens given part by part."""
    from nestq.attention import nested_attention_implementation
    from nestq.kv_cache import cache_keyword

    cache = NestedKVCache(model.config, max_length=32, device=model.device)
    keyword = cache_keyword(model)
    start, outputs = 0, []
    with nested_attention_implementation(model), nest_view("target"):
        for part in parts:
            positions = torch.arange(start, start + part.shape[1], device=model.device)[None]
            with cache.at(positions):
                options = {keyword: cache, "position_ids": positions, "use_cache": True}
                outputs.append(model(part, **options).logits)
            start += part.shape[1]
    return torch.cat(outputs, 1)


def test_a_compiled_model_gives_the_same_tokens() -> None:
    model = on_gpu()
    tokens = small_models.tokens(model, 1, 12).cuda()
    expected = run(model, tokens, 0).sequences
    torch._dynamo.reset()
    compiled = torch.compile(model)
    assert torch.equal(run(compiled, tokens, 0).sequences, run(compiled, tokens, 4).sequences)
    assert torch.equal(run(model, tokens, 4).sequences, expected)


def test_operators_pass_opcheck_and_run_in_graphs() -> None:
    torch.manual_seed(0)
    weight = nestq.NestedQuantTensor.from_hp(torch.randn(96, 128), 64).cuda()
    x = torch.randn(5, 128, device="cuda").bfloat16()
    planes = (weight.base, weight.refinement, weight.scale, weight.unit, None, 64, 8)
    cache_shape = (1, 2, 40, 32)
    keys, values = (
        [torch.zeros(cache_shape, dtype=torch.uint8).cuda() for _ in "br"] for _ in "kv"
    )
    scales = [torch.zeros(cache_shape[:3]).cuda() for _ in "kv"]
    states = torch.randn(1, 2, 5, 64, device="cuda").bfloat16()
    query = torch.randn(1, 4, 5, 64, device="cuda").bfloat16()
    positions = torch.arange(5, device="cuda")[None]
    attention = (query, positions, *keys, scales[0], *values, scales[1], 0.125, 0, 0)
    operators = torch.ops.nestq
    torch.library.opcheck(operators.dual_plane_linear.default, (x, *planes))
    torch.library.opcheck(operators.linear_16.default, (x, torch.randn_like(x), None))
    torch.library.opcheck(operators.kv_append.default, (states, positions, *keys, scales[0]))
    torch.library.opcheck(operators.nested_attention.default, attention)

    def step() -> tuple[Tensor, Tensor]:
        operators.kv_append(states, positions, *keys, scales[0])
        operators.kv_append(states * 2, positions, *values, scales[1])
        return operators.dual_plane_linear(x, *planes), operators.nested_attention(*attention)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for output in outputs:
        output.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(o, e) for o, e in zip(outputs, expected, strict=True))
    x.mul_(2)
    query.mul_(2)
    graph.replay()
    assert all(torch.equal(o, e) for o, e in zip(outputs, step(), strict=True))
