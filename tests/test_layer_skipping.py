"""Drafts that skip sublayers: what they compute, and that nothing else changes."""

import copy
import pickle
from functools import cache
from typing import Any

import pytest
import small_models
import torch
from nested_models import nest_
from quantized_models import neox
from speculative_runs import padded_prompts, run
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from nestq.architectures import UnsupportedArchitectureError, describe
from nestq.layer_skipping import skip_in_draft_, skipped_in_draft
from nestq.passes.backend import traced
from nestq.view import nest_view

ALL_FAMILIES = [*small_models.FAMILIES, "gemma2"]
# Of three layers.
CHOICES: list[tuple[list[int], list[int]]] = [
    ([1], []),
    ([], [1]),
    ([0], [2]),
    ([0, 1, 2], []),
    ([0, 2], [0, 1, 2]),
]


def build(family: str = "llama-gqa", nested: bool = False, **options: Any) -> PreTrainedModel:
    model = small_models.build(family, **{"num_hidden_layers": 3, **options})
    return nest_(model) if nested else model


@torch.no_grad()
def logits(model: Any, view: Any = None) -> Tensor:
    tokens = small_models.tokens(getattr(model, "_orig_mod", model))
    if view is None:
        return model(input_ids=tokens, use_cache=False).logits
    with nest_view(view):
        return model(input_ids=tokens, use_cache=False).logits


@torch.no_grad()
def without_(model: PreTrainedModel, attention: list[int], mlp: list[int]) -> PreTrainedModel:
    """Make sublayers output zeros in every view, by weights that are zero."""
    family = describe(model).family
    names = [(i, family.attention_output) for i in attention] + [
        (i, family.mlp_output) for i in mlp
    ]
    for index, name in names:
        for parameter in describe(model).linear(index, name).parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize(("attention", "mlp"), CHOICES)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_draft_computes_what_is_left_in_float64(
    family: str, attention: list[int], mlp: list[int]
) -> None:
    model = small_models.exact_(build(family))
    target = logits(model, "target")
    expected = logits(without_(copy.deepcopy(model), attention, mlp), "draft")

    skip_in_draft_(model, attention, mlp)

    # Adding zeros rounds nothing.
    assert torch.equal(logits(model, "draft"), expected)
    assert not torch.equal(expected, target)
    assert torch.equal(logits(model, "target"), target)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_skipping_both_sublayers_removes_the_layer(family: str) -> None:
    model = small_models.exact_(build(family))
    removed = copy.deepcopy(model)
    del removed.model.layers[2]
    removed.config.num_hidden_layers = 2

    skip_in_draft_(model, [2], [2])

    assert torch.equal(logits(model, "draft"), logits(removed, "draft"))


@pytest.mark.parametrize("nested", [False, True])
def test_outside_of_views_nothing_is_skipped(nested: bool) -> None:
    model = build(nested=nested)
    before = logits(model)
    skip_in_draft_(model, [0, 1], [2])

    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_what_is_skipped_computes_nothing(family: str) -> None:
    model = build(family)
    called: list[str] = []
    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    skip_in_draft_(model, [1], [0])
    family_names = describe(model).family
    names = set()
    for index, kind in ((1, "attention"), (0, "mlp")):
        start = "self_attn" if kind == "attention" else "mlp"
        names |= {f"model.layers.{index}.{start}.{n}" for n in ("o_proj", "down_proj")}
        names |= {f"model.layers.{index}.{norm}" for norm in family_names.norms[kind]}

    logits(model, "draft")
    assert not names & set(called)
    logits(model, "target")
    assert len(names & set(called)) == len(names) - 2  # each sublayer has one of the projections


def test_a_later_choice_replaces_an_earlier_one() -> None:
    model, other = build(), build()
    skip_in_draft_(model, [0, 1], [2])
    skip_in_draft_(model, [2, 1], [])
    skip_in_draft_(other, [1, 2], [])

    assert skipped_in_draft(model) == {"attention": [1, 2], "mlp": []}
    assert torch.equal(logits(model, "draft"), logits(other, "draft"))


def test_empty_lists_restore_the_model() -> None:
    model = build()
    types = [type(module) for module in model.modules()]
    skip_in_draft_(model, [0, 1], [2])
    assert [type(module) for module in model.modules()] != types

    skip_in_draft_(model, [], [])

    assert [type(module) for module in model.modules()] == types
    assert skipped_in_draft(model) == {"attention": [], "mlp": []}


def test_models_of_unknown_structure_skip_nothing() -> None:
    model = neox()
    skip_in_draft_(model, [], [])

    assert skipped_in_draft(model) == {"attention": [], "mlp": []}
    with pytest.raises(UnsupportedArchitectureError, match=r"config\.model_type is 'gpt_neox'"):
        skip_in_draft_(model, [0], [])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_skips_what_the_original_skips(duplicate: Any) -> None:
    model = build()
    skip_in_draft_(model, [0], [1, 2])
    expected = logits(model, "draft")

    copied = duplicate(model)
    skip_in_draft_(model, [], [])

    assert skipped_in_draft(copied) == {"attention": [0], "mlp": [1, 2]}
    assert torch.equal(logits(copied, "draft"), expected)
    assert torch.equal(logits(copied, "target"), logits(model, "target"))
    skip_in_draft_(copied, [], [])
    assert torch.equal(logits(copied, "draft"), logits(model, "draft"))


def test_names_and_state_dict_stay() -> None:
    model = build()
    names = [name for name, _ in model.named_modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    skip_in_draft_(model, [0], [1])

    assert [name for name, _ in model.named_modules()] == names
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert isinstance(model.model.layers[0].self_attn, type(model.model.layers[1].self_attn))


def test_a_forward_that_a_library_replaced_is_skipped_too() -> None:
    model = build()
    skip_in_draft_(model, [], [1])
    expected = logits(model, "draft")
    skip_in_draft_(model, [], [])
    mlp: Any = model.model.layers[1].mlp
    mlp.forward = mlp.forward  # in the instance, as libraries that move weights do
    skip_in_draft_(model, [], [1])

    assert torch.equal(logits(model, "draft"), expected)


@pytest.mark.parametrize("nested", [False, True])
def test_compiled_graphs_are_those_of_the_view_and_the_choice(nested: bool) -> None:
    model = build(nested=nested, num_hidden_layers=2)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for attention, mlp in ([], []), ([0], [1]), ([0], []):
        skip_in_draft_(compiled, attention, mlp)
        expected = {view: logits(model, view) for view in ("draft", "target")}
        for view in ("draft", "target") * 2:
            assert torch.equal(logits(compiled, view), expected[view])
        toggled = counter.frame_count
        for view in ("target", "draft"):
            logits(compiled, view)
        assert counter.frame_count == toggled


def test_traced_models_skip() -> None:
    model = build(nested=True, num_hidden_layers=2)
    forward = traced(model)
    for attention, mlp in ([0], [1]), ([1], []):
        skip_in_draft_(model, attention, mlp)
        for view in ("draft", "target"):
            assert torch.equal(logits_of(forward, model, view), logits(model, view))


@torch.no_grad()
def logits_of(forward: Any, model: PreTrainedModel, view: Any) -> Tensor:
    with nest_view(view):
        return forward(input_ids=small_models.tokens(model), use_cache=False).logits


@cache
def decoding_model(nested: bool) -> PreTrainedModel:
    model = build(nested=nested, num_hidden_layers=2, head_dim=32)  # as QuantSpec needs it
    model.generation_config.eos_token_id = None
    skip_in_draft_(model, [0], [1])
    return model


@pytest.mark.parametrize("kv", ["16/16", "kv4/kv8", "quantspec"])
@pytest.mark.parametrize("nested", [False, True])
def test_decoding_stays_bitwise_that_of_the_target(nested: bool, kv: str) -> None:
    model = decoding_model(nested)
    tokens, mask = padded_prompts(model, [0, 5], 9)
    options = {"kv": kv, "attention_mask": mask, "output_logits": True, "max_new_tokens": 7}
    alone = run(model, tokens, 0, **options)
    for gamma in (1, 2, 3, 4):
        output = run(model, tokens, gamma, **options)
        assert torch.equal(output.sequences, alone.sequences)
        for ours, theirs in zip(output.logits, alone.logits, strict=True):
            assert torch.equal(ours, theirs)
        assert output.metrics is not None
        assert output.metrics.slot_acceptance < 1


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    ([3], [], ValueError, "attention must be layer indices from 0 to 2, got 3"),
    ([], [0, 7], ValueError, "mlp must be layer indices from 0 to 2, got 7"),
    ([-1], [], ValueError, "attention: a layer index must be an int >= 0, got -1"),
    ([True], [], ValueError, "attention: a layer index must be an int >= 0, got True"),
    ([1.0], [], ValueError, r"attention: a layer index must be an int >= 0, got 1\.0"),
    ([], ["1"], ValueError, "mlp: a layer index must be an int >= 0, got '1'"),
    ([2, 1, 2], [], ValueError, "attention must name each layer once, got 2 twice"),
    (1, [], TypeError, "attention must be a list of layer indices, got int 1"),
    ([], None, TypeError, "mlp must be a list of layer indices, got NoneType None"),
    ([], "12", TypeError, "mlp must be a list of layer indices, got str '12'"),
    ([0, 1, 2], [0, 1, 2], ValueError, "attention and mlp must leave a sublayer .* all 3 layers"),
]


@pytest.mark.parametrize(("attention", "mlp", "error", "message"), REFUSED)
def test_bad_choices_are_refused_and_the_earlier_one_stays(
    attention: Any, mlp: Any, error: type[Exception], message: str
) -> None:
    model = build()
    skip_in_draft_(model, [1], [2])
    with pytest.raises(error, match=message):
        skip_in_draft_(model, attention, mlp)

    assert skipped_in_draft(model) == {"attention": [1], "mlp": [2]}


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        skip_in_draft_("model", [0], [])  # type: ignore[arg-type]


def test_any_module_skips_nothing_by_itself() -> None:
    assert skipped_in_draft(nn.Linear(2, 2)) == {"attention": [], "mlp": []}
