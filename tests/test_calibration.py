"""Calibration: what is taken as input, what layers are shown, and what is left behind."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import datasets
import numpy as np
import pytest
import small_models
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerFast

from nestq import calibration as module
from nestq.architectures import HEAD, describe
from nestq.calibration import (
    LayerInputs,
    calibration_windows,
    evaluation_mode,
    fake_quantize,
    moved,
    replaced_forward,
    rounded_inputs,
    sweep_layers,
)
from nestq.gptq import CalibrationError, Hessian

CPU = torch.device("cpu")
IDS = [[5, 6, 7], [8, 9, 10, 11]]
PADDED = {
    "input_ids": [[0, 5, 6, 7], [0, 0, 0, 0], [8, 9, 10, 11]],
    "attention_mask": [[0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]],
}


def letters() -> PreTrainedTokenizerFast:
    words = ["</s>", *"abcdefgh"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "</s>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


# What is taken.


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        [torch.tensor(row) for row in IDS],
        [torch.tensor(IDS[0], dtype=torch.int32), IDS[1]],
        [tuple(row) for row in IDS],
        [[np.int64(token) for token in row] for row in IDS],
        torch.tensor([5, 6, 7, 8, 9, 10, 11]),
        datasets.Dataset.from_dict({"input_ids": IDS, "text": ["x", "y"]}),
        datasets.Dataset.from_dict({"input_ids": IDS}).with_format("torch"),
        datasets.Dataset.from_dict(PADDED),
        datasets.Dataset.from_dict(PADDED).with_format("torch"),
    ],
)
def test_token_ids(given: Any) -> None:
    windows = calibration_windows(given, None, 12, 3)
    assert windows.dtype == torch.int64
    assert windows.tolist() == [[5, 6, 7], [8, 9, 10]]


def test_rows_of_a_tensor() -> None:
    rows = torch.arange(12).view(3, 4)
    assert torch.equal(calibration_windows(rows, None, 12, 4), rows)
    assert calibration_windows(rows, None, 12, 2048).tolist() == [list(range(12))]


@pytest.mark.parametrize(
    "given",
    [
        ["abc", "de"],
        ("abc", "de"),
        datasets.Dataset.from_dict({"text": ["abc", "de"]}),
        [[{"role": "user", "content": "abc"}], "de"],
        datasets.Dataset.from_dict(
            {"messages": [[{"role": "user", "content": text}] for text in ("abc", "de")]}
        ),
    ],
)
def test_texts(given: Any) -> None:
    assert calibration_windows(given, letters(), 9, 3).tolist() == [[1, 2, 3], [0, 4, 5]]


REFUSED: list[tuple[Any, bool, type[Exception], str]] = [
    ("abc", True, TypeError, "single string"),
    (b"abc", True, TypeError, "single string"),
    ([], True, ValueError, "calibration is empty"),
    (torch.zeros(0, 4, dtype=torch.int64), False, ValueError, "calibration is empty"),
    ([[]], False, TypeError, "calibration must hold"),
    (torch.rand(2, 8), False, ValueError, r"calibration\[0\].*float32"),
    ([[1, 2], torch.rand(3)], False, ValueError, r"calibration\[1\].*float32"),
    (torch.ones(2, 2, dtype=torch.bool), False, ValueError, r"calibration\[0\].*bool"),
    (torch.ones(1, 2, 3, dtype=torch.int64), False, ValueError, r"1-D or 2-D.*\(1, 2, 3\)"),
    ([[1, 2, 97]], False, ValueError, "from 1 to 97.*vocabulary has 97"),
    ([[1, -1]], False, ValueError, "from -1 to 1.*vocabulary has 97"),
    (["abc"], False, ValueError, "pass tokenizer="),
    ([[1, 2], "abc"], True, TypeError, r"calibration\[1\].*'abc'"),
    ([1, 2, 3], True, TypeError, "calibration must hold.*got 1 first"),
    ([{"role": "user", "content": "abc"}], True, TypeError, "calibration must hold"),
    ([""], True, ValueError, "no tokens"),
    (BatchEncoding({"input_ids": [[1]]}), True, TypeError, "BatchEncoding with keys"),
    (datasets.Dataset.from_dict({"prose": ["abc"]}), True, ValueError, r"columns \['prose'\]"),
    (
        datasets.Dataset.from_dict({"input_ids": [[1], [1, 2]], "attention_mask": [[1], [1]]}),
        False,
        ValueError,
        r"calibration\[1\] must have an attention_mask .* got 1 and 2",
    ),
    (
        datasets.Dataset.from_dict({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}),
        False,
        ValueError,
        "attention_mask that hides them all",
    ),
]


@pytest.mark.parametrize(("given", "with_tokenizer", "error", "message"), REFUSED)
def test_refused(given: Any, with_tokenizer: bool, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        calibration_windows(given, letters() if with_tokenizer else None, 97, 16)


# What layers are shown.


@pytest.fixture
def model() -> PreTrainedModel:
    return small_models.build("llama-gqa")


def leave(names: Sequence[str], linears: Sequence[nn.Linear], hessian: Tensor) -> list[Tensor]:
    return []


def sweep(model: PreTrainedModel, process: Any, batch_size: int = 2, rows: int = 4) -> LayerInputs:
    architecture = describe(model)
    windows = small_models.tokens(model, rows, 24)
    inputs = LayerInputs(architecture, windows, batch_size, CPU)
    sweep_layers(architecture, inputs, process, with_head=True, description="sweep", progress=False)
    return inputs


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in small_models.FAMILIES),
    # Layers that attend differently: a window in some of them.
    ("gemma2", {"sliding_window": 4}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_what_layers_see_is_what_the_model_computes(family: str, options: dict[str, Any]) -> None:
    model = small_models.build(family, **options)
    architecture = describe(model)
    with torch.no_grad(), rounded_inputs([linear for _, linear in architecture.named_linears()]):
        expected = model.model(small_models.tokens(model, 4, 24)).last_hidden_state
    inputs = sweep(model, leave)
    with torch.no_grad():
        hidden = architecture.final_norm(torch.cat(inputs.hidden))
    # Four rows at once or two: float noise may flip a step of INT8, 1/127 of the largest channel.
    assert (hidden - expected).norm() < 1e-2 * expected.norm()


def test_every_group_is_shown_once_with_its_inputs(model: PreTrainedModel) -> None:
    seen: dict[str, Tensor] = {}
    order: list[str] = []

    def process(
        names: Sequence[str], linears: Sequence[nn.Linear], hessian: Tensor
    ) -> list[Tensor]:
        assert [model.get_submodule(name) for name in names] == list(linears)
        order.extend(names)
        seen.update(dict.fromkeys(names, hessian))
        return []

    observed: dict[str, list[Tensor]] = {}
    architecture = describe(model)
    named = dict(architecture.named_linears()) | {HEAD: architecture.head}
    sweep(model, process, batch_size=4)  # as below, so that even float noise is the same
    assert order == list(named)
    hooks = [
        linear.register_forward_hook(
            lambda _, args, __, name=name: observed.setdefault(name, []).append(args[0])
        )
        for name, linear in named.items()
    ]
    with torch.no_grad(), rounded_inputs(list(named.values())):
        model(small_models.tokens(model, 4, 24))
    for hook in hooks:
        hook.remove()
    for name, inputs in observed.items():
        rows = fake_quantize(inputs[0]).flatten(0, 1)
        expected = rows.T @ rows / len(rows)
        assert (seen[name] - expected).norm() < 1e-5 * expected.norm(), name


@pytest.mark.parametrize(("family", "groups"), [("llama-gqa", 4), ("phi3", 4)])
def test_linears_of_a_group_share_a_hessian(
    family: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    rows: list[int] = []

    class Counted(Hessian):
        def __init__(self, features: int, device: torch.device) -> None:
            made.append(features)
            super().__init__(features, device)

        def add(self, x: Tensor) -> None:
            rows.append(x.shape[:-1].numel())
            super().add(x)

    monkeypatch.setattr(module, "Hessian", Counted)
    model = small_models.build(family)
    sweep(model, leave, batch_size=2, rows=4)
    assert made == [48, 64, 48, 100] * 2 + [48]
    assert rows == [2 * 24] * (2 * (groups * 2 + 1))


def test_later_layers_see_what_process_made_of_earlier_ones(model: PreTrainedModel) -> None:
    def blank_first(
        names: Sequence[str], linears: Sequence[nn.Linear], hessian: Tensor
    ) -> list[Tensor]:
        if not names[0].startswith("model.layers.0."):
            return []
        return [torch.zeros_like(linear.weight) for linear in linears]

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, changed = sweep(model, leave), sweep(model, blank_first)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with torch.no_grad():
        for name, linear in describe(model).named_linears():
            if name.startswith("model.layers.0."):
                linear.weight.zero_()
    expected = sweep(model, leave)
    for ours, theirs, other in zip(changed.hidden, expected.hidden, plain.hidden, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.allclose(ours, other)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_the_batch_size_is_only_float_noise(model: PreTrainedModel, batch_size: int) -> None:
    def collect(batch_size: int) -> list[Tensor]:
        hessians: list[Tensor] = []
        sweep(model, lambda names, linears, hessian: hessians.append(hessian) or [], batch_size)
        return hessians

    for ours, theirs in zip(collect(batch_size), collect(2), strict=True):
        # Noise of 1e-7 flips a few INT8 codes, each by 1/127 of a row's largest value.
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()


def test_only_as_many_kwargs_as_layers(model: PreTrainedModel) -> None:
    inputs = LayerInputs(describe(model), small_models.tokens(model, 5, 8), 2, CPU)
    assert [len(hidden) for hidden in inputs.hidden] == [2, 2, 1]
    assert [len(calls) for calls in inputs.kwargs] == [2, 2, 2]
    assert all(not hidden.requires_grad for hidden in inputs.hidden)


# What is left behind.


def assert_no_trace(model: PreTrainedModel) -> None:
    for name, submodule in model.named_modules():
        assert "forward" not in submodule.__dict__, name
        assert not submodule._forward_hooks, name
        assert not submodule._forward_pre_hooks, name


@pytest.mark.parametrize("at", ["layers.0.self_attn.q", "layers.1.mlp.down", HEAD])
def test_an_error_leaves_the_model_as_it_was(model: PreTrainedModel, at: str) -> None:
    tokens = small_models.tokens(model)
    with torch.no_grad():
        expected = model(tokens).logits
    weights = dict(model.named_parameters())

    def fail(names: Sequence[str], linears: Sequence[nn.Linear], hessian: Tensor) -> list[Tensor]:
        if at in names[0]:
            raise RuntimeError("stop")
        return [torch.zeros_like(linear.weight) for linear in linears]

    with pytest.raises(RuntimeError, match="stop"):
        sweep(model, fail)
    assert_no_trace(model)
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected)


def test_an_error_while_inputs_are_captured(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(model.model.rotary_emb, "forward", raise_stop)
        with pytest.raises(RuntimeError, match="stop"):
            LayerInputs(describe(model), small_models.tokens(model), 2, CPU)
    assert_no_trace(model)


def raise_stop(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("stop")


def test_inputs_that_are_not_finite_name_the_layer(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(1e30)
        model.model.layers[0].mlp.gate_proj.weight.fill_(1e30)
    with pytest.raises(CalibrationError, match=r"model\.layers\.0\.mlp\.down_proj: .*NaN"):
        sweep(model, leave)
    assert_no_trace(model)


def test_moved_returns_to_where_it_was() -> None:
    linear = nn.Linear(3, 3)
    moves: list[torch.device] = []
    linear.to = lambda device: moves.append(device) or linear  # type: ignore[method-assign]
    context = moved(linear, torch.device("meta"))
    assert context.__enter__() is linear
    assert moves == [torch.device("meta")]
    assert not context.__exit__(RuntimeError, RuntimeError("stop"), None)
    assert moves == [torch.device("meta"), CPU]


@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_mode_is_left_as_it_was_entered(model: PreTrainedModel, fails: bool) -> None:
    model.train()
    model.model.layers[0].eval()
    modes = [submodule.training for submodule in model.modules()]
    with suppress(RuntimeError), evaluation_mode(model):
        assert not any(submodule.training for submodule in model.modules())
        if fails:
            raise_stop()
    assert [submodule.training for submodule in model.modules()] == modes


@pytest.mark.parametrize("wrapped", [False, True])
def test_forward_is_restored(wrapped: bool) -> None:
    linear = nn.Linear(3, 3)
    if wrapped:
        linear.forward = lambda x: x + 1  # type: ignore[method-assign]
    before = dict(linear.__dict__)
    with replaced_forward(linear, lambda x: x):
        assert torch.equal(linear(torch.ones(3)), torch.ones(3))
    assert linear.__dict__ == before


def test_fake_quantize() -> None:
    x = torch.tensor([[127.0, 63.25, -1.6], [0, 0, 0]], dtype=torch.bfloat16)
    rounded = fake_quantize(x)
    assert rounded.dtype == torch.bfloat16
    assert rounded.tolist() == [[127.0, 63.0, -2.0], [0, 0, 0]]
