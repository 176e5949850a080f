"""What the rotations refuse, and that nothing was changed by then."""

from collections.abc import Callable

import pytest
import small_models
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from nestq.architectures import UnsupportedArchitectureError, describe
from nestq.orthogonal import random_orthogonal
from nestq.rotation import Rotation, rotate_


def draw(model: nn.Module, seed: int = 0, **options: object) -> Rotation:
    return Rotation.random(describe(model), seed, **options)  # type: ignore[arg-type]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every weight, under every name it has; NaN as zero, to compare."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.detach().clone().float().nan_to_num() for name, p in named if not p.is_meta}


def matrices(rotation: Rotation) -> list[Tensor]:
    assert rotation.r1 is not None
    assert rotation.r2 is not None
    return [rotation.r1, *rotation.r2]


def assert_unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    now = weights(model)
    assert now.keys() == before.keys()
    assert [name for name, value in now.items() if not torch.equal(value, before[name])] == []


def r1_of_another_model(model: PreTrainedModel) -> Rotation:
    return draw(small_models.build("llama-gqa", hidden_size=32, num_hidden_layers=2))


def r2_of_another_model(model: PreTrainedModel) -> Rotation:
    return draw(small_models.build("llama-gqa", head_dim=8))


def r2_for_too_few_layers(model: PreTrainedModel) -> Rotation:
    return draw(small_models.build("llama-gqa", num_hidden_layers=1))


def replace_last(model: PreTrainedModel, weight: Tensor) -> Rotation:
    """Only final norm and head are rotated after the down projection of the last layer."""
    rotation = draw(model)
    model.model.layers[1].mlp.down_proj.weight = nn.Parameter(weight, requires_grad=False)
    return rotation


def nan_in_the_last_layer(model: PreTrainedModel) -> Rotation:
    weight = torch.ones(48, 100)
    weight[-1, -1] = torch.nan
    return replace_last(model, weight)


def infinity_in_the_final_norm(model: PreTrainedModel) -> Rotation:
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    return draw(model)


def meta_weight_in_the_last_layer(model: PreTrainedModel) -> Rotation:
    return replace_last(model, torch.ones(48, 100, device="meta"))


def float8_weight_in_the_last_layer(model: PreTrainedModel) -> Rotation:
    return replace_last(model, torch.ones(48, 100, dtype=torch.float8_e4m3fn))


def integer_weight_in_the_last_layer(model: PreTrainedModel) -> Rotation:
    return replace_last(model, torch.ones(48, 100, dtype=torch.int8))


def computed_weight_in_the_last_layer(model: PreTrainedModel) -> Rotation:
    parametrize.register_parametrization(
        model.model.layers[1].mlp.down_proj, "weight", nn.Hardtanh()
    )
    return draw(model)


def two_layers_with_one_weight(model: PreTrainedModel) -> Rotation:
    first, second = model.model.layers
    second.mlp.down_proj.weight = first.mlp.down_proj.weight
    return draw(model)


def head_that_is_a_view_of_the_embedding(model: PreTrainedModel) -> Rotation:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach())
    return draw(model)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (r1_of_another_model, ValueError, r"r1: expected the hidden_size of the model, 48, .*32"),
        (r2_of_another_model, ValueError, r"r2\[0\]: expected the head_dim of the model, 16"),
        (r2_for_too_few_layers, ValueError, r"r2: expected one matrix for each of 2 .* got 1"),
        (nan_in_the_last_layer, ValueError, r"layers.1.mlp.down_proj.weight: contains NaN"),
        (infinity_in_the_final_norm, ValueError, r"model.norm.weight: contains NaN or infinity"),
        (meta_weight_in_the_last_layer, ValueError, r"layers.1.mlp.down_proj.weight: .*meta"),
        (float8_weight_in_the_last_layer, TypeError, r"down_proj.weight: .*float8_e4m3fn"),
        (integer_weight_in_the_last_layer, TypeError, r"down_proj.weight: .*torch.int8"),
        (computed_weight_in_the_last_layer, TypeError, r"down_proj.weight: .* got Tensor"),
        (two_layers_with_one_weight, ValueError, r"layers.0.*layers.1.* share memory"),
        (head_that_is_a_view_of_the_embedding, ValueError, r"lm_head.weight share memory"),
    ],
)
def test_refused_input_leaves_the_model_as_it_was(
    spoil: Callable[[PreTrainedModel], Rotation], error: type[Exception], message: str
) -> None:
    model = small_models.build("llama-gqa", tied=True)
    rotation = spoil(model)
    tied = describe(model).tied
    before = weights(model)

    with pytest.raises(error, match=message):
        rotate_(model, rotation)

    assert_unchanged(model, before)
    assert describe(model).tied == tied
    assert model.config.tie_word_embeddings


def test_gemma2_refuses_r1_with_the_reason() -> None:
    model = small_models.build("gemma2")
    before = weights(model)
    generator = torch.Generator().manual_seed(0)
    by_hand = Rotation(r1=random_orthogonal(48, generator), r2=None)

    with pytest.raises(UnsupportedArchitectureError, match="norms after attention"):
        draw(model)
    with pytest.raises(UnsupportedArchitectureError, match="norms after attention"):
        rotate_(model, by_hand)

    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("matrix", "error", "message"),
    [
        (torch.eye(4), TypeError, "expected a torch.float64 tensor, got torch.float32"),
        ([[1.0]], TypeError, "expected a torch.float64 tensor, got list"),
        (torch.ones(4, dtype=torch.float64), ValueError, "square"),
        (torch.eye(4, dtype=torch.float64)[:3], ValueError, "square"),
        (torch.eye(4, dtype=torch.float64) * (1 + 1e-9), ValueError, "differs .* by 2.0e-09"),
        (torch.full((4, 4), torch.nan, dtype=torch.float64), ValueError, "by nan"),
    ],
)
def test_a_rotation_that_is_not_orthogonal_is_refused(
    matrix: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"r1: .*{message}"):
        Rotation(r1=matrix, r2=None)
    with pytest.raises(error, match=rf"r2\[1\]: .*{message}"):
        Rotation(r1=None, r2=(torch.eye(4, dtype=torch.float64), matrix))


def test_random_follows_its_seed() -> None:
    model = small_models.build("llama-gqa")
    first, again, other = (matrices(draw(model, seed)) for seed in (0, 0, 1))

    assert len(first) == 3
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert not torch.equal(first[1], first[2])


def test_random_hadamard_has_entries_of_one_magnitude() -> None:
    rotation = draw(small_models.build("llama-gqa"), kind="hadamard")

    for matrix in matrices(rotation):
        assert matrix.abs().unique().numel() == 1


def test_random_refuses_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"kind: expected one of .*hadamard.*, got 'givens'"):
        draw(small_models.build("llama-gqa"), kind="givens")


def test_random_asks_only_for_sizes_it_needs() -> None:
    model = small_models.build("llama-gqa", head_dim=6)  # there is no Hadamard matrix of size 6

    assert draw(model, kind="hadamard", r2=False).r2 is None
    with pytest.raises(ValueError, match="no Hadamard matrix of size 6"):
        draw(model, kind="hadamard")
