"""What a draft that skips sublayers is expected to bring, and the search for the best one."""

from typing import Any

import pytest
import small_models
import torch
from nested_models import nest_
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from nestq.architectures import describe
from nestq.kv_cache import cache_keyword
from nestq.layer_search import (
    DraftMeter,
    SkippedDraft,
    Sublayer,
    search_layers,
    sublayers,
    tokens_per_round,
)
from nestq.layer_skipping import skip_in_draft_, skipped_in_draft
from nestq.view import nest_view

Y, N = True, False


@pytest.mark.parametrize(
    ("agreed", "gamma", "expected"),
    [
        ([Y, Y, Y, Y, Y], 4, 5),  # four drafts and the bonus token
        ([N, N, N], 4, 1),
        ([Y, N, Y, N], 4, 2),  # accepted and recovered, twice
        ([Y, Y, Y, N, Y, N], 2, 2),  # 2 + 1, 0 + 1, 1 + 1
        ([Y, Y, N, N, Y], 1, 5 / 4),  # accepted and bonus, recovered twice, accepted
        ([Y], 3, 1),
    ],
)
def test_tokens_per_round(agreed: list[bool], gamma: int, expected: float) -> None:
    assert tokens_per_round(agreed, gamma) == expected


def test_speed_is_tokens_by_bytes() -> None:
    draft = SkippedDraft((), 3, 0.9, 0.1, tokens_per_round=3.0, cost=0.5)

    assert draft.speed == 3.0 / (3 * 0.5 + 1)


def prompts(model: PreTrainedModel, rows: int = 6, length: int = 4) -> Tensor:
    return small_models.tokens(model, rows, length)


def useless_mlp(layer: int, **options: Any) -> PreTrainedModel:
    """A model of three layers of which one MLP does nothing."""
    model = small_models.build("llama-gqa", num_hidden_layers=3, **options)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model


def test_a_draft_that_skips_nothing_is_the_target() -> None:
    model = useless_mlp(1)
    draft = DraftMeter(model, prompts(model), gamma=3, new_tokens=8)(())

    assert draft.agreement == 1
    assert draft.tokens_per_round == 4  # 8 tokens are two rounds
    assert draft.cost == 1
    assert draft.speed == 1
    assert draft.layers("attention") == draft.layers("mlp") == ()


@pytest.mark.parametrize("family", [*small_models.FAMILIES, "gemma2"])
@torch.no_grad()
def test_drafts_read_the_keys_of_the_target_before_them(family: str) -> None:
    """In a round, one token is drafted on a cache that the target wrote."""
    model = small_models.exact_(small_models.build(family, num_hidden_layers=3))
    model.generation_config.eos_token_id = None
    ids, new = prompts(model, rows=5), 4
    skipped = [Sublayer("attention", 1), Sublayer("mlp", 2)]
    drafted, target = [], []
    for _ in range(new):
        before, one = DynamicCache(), {cache_keyword(model): DynamicCache(), "use_cache": True}
        keyword = {cache_keyword(model): before, "use_cache": True}
        if ids.shape[1] > 1:
            model(input_ids=ids[:, :-1], **keyword)
        skip_in_draft_(model, [1], [2])
        with nest_view("draft"):
            # The first layer says how long the cache is.
            logits = model(input_ids=ids[:, -1:], **keyword).logits[:, -1]
        skip_in_draft_(model, [], [])
        drafted.append(logits)
        target.append(model(input_ids=ids, **one).logits[:, -1].argmax(-1, keepdim=True))
        ids = torch.cat((ids, target[-1]), dim=1)
    targets = torch.cat(target, dim=1)
    log_probabilities = torch.stack(drafted, dim=1).float().log_softmax(-1)
    surprise = -log_probabilities.gather(2, targets[..., None]).mean().item()
    agreement = (torch.stack(drafted, dim=1).argmax(-1) == targets).float().mean().item()

    draft = DraftMeter(model, prompts(model, rows=5), new_tokens=new, batch_size=2)(skipped)

    assert draft.agreement == pytest.approx(agreement, abs=1e-6)
    # The meter takes the mean of float32 losses of at most 20 nats.
    assert draft.surprise == pytest.approx(surprise, abs=20 * 2**-20)


def test_continuations_end_with_the_sequence() -> None:
    model = useless_mlp(1)
    endless = DraftMeter(model, prompts(model), new_tokens=8)
    ids = endless._continuations[0].ids[:, 4:]
    model.generation_config.eos_token_id = [int(ids[0, 2]), 96]

    given = DraftMeter(model, prompts(model), new_tokens=8)._continuations[0]

    ends = torch.isin(ids, torch.tensor(model.generation_config.eos_token_id))
    expected = [row.index(True) + 1 if any(row) else 8 for row in ends.tolist()]
    assert given.known.sum(1).tolist() == expected
    assert expected[0] <= 3


def test_costs_are_bytes_of_weights() -> None:
    model = small_models.build("llama-gqa", num_hidden_layers=3)
    architecture = describe(model)
    total = sum(linear.weight.nbytes for _, linear in architecture.named_linears())
    total += architecture.head.weight.nbytes
    total += 7 * architecture.final_norm.weight.nbytes  # two norms a layer, one at the end
    mlp = sum(p.nbytes for p in model.model.layers[0].mlp.parameters())
    attention = sum(p.nbytes for p in model.model.layers[0].self_attn.parameters())
    meter = DraftMeter(model, prompts(model), new_tokens=2)

    skipped = [Sublayer("mlp", 0), Sublayer("attention", 2)]
    assert meter(skipped).cost == pytest.approx(1 - (mlp + attention) / total, rel=1e-12)


def test_a_nested_draft_reads_the_base() -> None:
    model = nest_(small_models.build("llama-gqa", num_hidden_layers=1), group_size=64)
    model.generation_config.eos_token_id = None
    meter = DraftMeter(model, prompts(model), new_tokens=4)
    draft = meter(())

    assert 0.5 < draft.cost < 0.6  # a base and scales of a base, a refinement and scales
    assert 0 < draft.agreement < 1
    assert meter([Sublayer("mlp", 0)]).cost < draft.cost


@pytest.mark.parametrize("layer", [0, 2])
def test_the_search_finds_a_sublayer_that_does_nothing(layer: int) -> None:
    model = useless_mlp(layer, dtype=torch.float64)
    meter = DraftMeter(model, prompts(model), gamma=3, new_tokens=8)
    best = search_layers(meter, progress=False)

    assert meter([Sublayer("mlp", layer)]).agreement == 1
    assert Sublayer("mlp", layer) in best.sublayers
    assert best.speed >= meter([Sublayer("mlp", layer)]).speed > 1


def test_the_search_leaves_the_model_and_gives_the_same_again() -> None:
    model = useless_mlp(1)
    skip_in_draft_(model, [0], [])
    model.train()
    results = [
        search_layers(DraftMeter(model, prompts(model), new_tokens=4), progress=False)
        for _ in range(2)
    ]

    assert results[0] == results[1]
    assert skipped_in_draft(model) == {"attention": [0], "mlp": []}
    assert all(module.training for module in model.modules())


def test_the_search_gives_the_fastest_of_all_that_it_measured() -> None:
    model = useless_mlp(1)
    measured: list[SkippedDraft] = []

    class Recording(DraftMeter):
        def __call__(self, skipped: Any) -> SkippedDraft:
            measured.append(super().__call__(skipped))
            return measured[-1]

    best = search_layers(Recording(model, prompts(model), new_tokens=4), progress=False)

    assert best.speed == max(draft.speed for draft in measured if draft.sublayers)
    assert measured[0].sublayers == ()
    assert {draft.sublayers for draft in measured[1:7]} == {
        (sublayer,) for sublayer in sublayers(describe(model))
    }


def test_attention_without_masks_is_refused() -> None:
    model = useless_mlp(1)
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"attn_implementation of .* got 'flash_attention_2'"):
        DraftMeter(model, prompts(model))
