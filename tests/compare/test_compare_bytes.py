"""Bytes that a contender stores and reads, counted by hand."""

import pytest
import small_models
import torch
from nested_models import nest_
from transformers import PreTrainedModel

from nestq.bench.bytes_read import dense_kv_bytes, kv_bytes, nested_kv_bytes, weight_bytes
from nestq.compare.contenders import CONTENDERS, Contender, always
from nestq.compare.quality import ByteCounter, cache_bytes
from nestq.compare.weights_read import stored_weight_bytes, weight_bytes_read
from nestq.four_bit_recipe import qspec_w4, quantspec_w4w16
from nestq.kv_policy import WHOLE, KVPolicy, KVRead
from nestq.layer_skipping import skip_in_draft_
from nestq.quantize import quantize_
from nestq.recipes import w8a8
from nestq.reference.quantspec import SLOTS

# The small Llama: hidden 48, 4 heads of 16, 2 of keys, MLP of 100, 97 tokens, 2 layers. Rows and
# columns of its linears:
ATTENTION = [(64, 48), (32, 48), (32, 48), (48, 64)]
MLP = [(100, 48), (100, 48), (48, 100)]
LINEARS = 2 * [*ATTENTION, *MLP]
HEAD = (97, 48)
NORMS = 2 * (2 * 2 + 1) * 48
EMBEDDING = 2 * 97 * 48
# Of keys and values, in both layers, 2 heads of 16 each.
VECTORS = 2 * 2 * 2


def dense_bytes(shapes: list[tuple[int, int]]) -> int:
    return sum(2 * rows * columns for rows, columns in shapes)


def plane_bytes(shapes: list[tuple[int, int]], group: int, planes: int = 1) -> int:
    """A row of K has ceil(K / group) groups, each of 4 bits a code and a 16-bit scale."""
    return sum(rows * -(-columns // group) * (group // 2 * planes + 2) for rows, columns in shapes)


def dense(**options: bool) -> PreTrainedModel:
    return small_models.build("llama-gqa", dtype=torch.bfloat16, **options)


def parsed(kv: str) -> KVPolicy:
    return KVPolicy.parse(kv)


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_model_reads_all_but_the_embedding(tied: bool) -> None:
    model = dense(tied=tied)
    read = dense_bytes([*LINEARS, HEAD]) + NORMS
    assert weight_bytes_read(model, "draft") == weight_bytes_read(model, "target") == read
    assert stored_weight_bytes(model) == read + (0 if tied else EMBEDDING)


def test_a_nested_model_reads_planes() -> None:
    model = nest_(dense())  # in groups of 32
    shapes = [*LINEARS, HEAD]
    assert weight_bytes_read(model, "draft") == plane_bytes(shapes, 32) + NORMS
    assert weight_bytes_read(model, "target") == plane_bytes(shapes, 32, 2) + NORMS
    assert stored_weight_bytes(model) == plane_bytes(shapes, 32, 2) + NORMS + EMBEDDING
    for view in ("draft", "target"):
        assert weight_bytes_read(model, view) == weight_bytes(model, view)


def test_quantspec_reads_the_base_or_the_dense_weight() -> None:
    model = dense()
    with pytest.warns(UserWarning, match="no calibration"):
        quantize_(model, quantspec_w4w16(), progress=False)
    base, whole = (size([*LINEARS, HEAD]) for size in (lambda s: plane_bytes(s, 64), dense_bytes))
    assert weight_bytes_read(model, "draft") == base + NORMS
    assert weight_bytes_read(model, "target") == whole + NORMS
    assert stored_weight_bytes(model) == base + whole + NORMS + EMBEDDING


def test_qspec_reads_the_same_twice() -> None:
    """Its head stays dense."""
    model = dense()
    with pytest.warns(UserWarning, match="no calibration"):
        quantize_(model, qspec_w4(), progress=False)
    read = plane_bytes(LINEARS, 64) + dense_bytes([HEAD]) + NORMS
    assert weight_bytes_read(model, "draft") == weight_bytes_read(model, "target") == read


def test_a_model_of_torchao_is_seen_without_views() -> None:
    model = dense()
    quantize_(model, w8a8(), progress=False)
    shapes = [*LINEARS, HEAD]
    codes = sum(rows * columns for rows, columns in shapes)
    read = weight_bytes_read(model, None)
    # A scale, and at most a zero point, for each row.
    rows = sum(rows for rows, _ in shapes)
    assert codes + NORMS < read <= codes + NORMS + 8 * rows + 8 * len(shapes)


def test_a_draft_does_not_read_what_it_skips() -> None:
    model = dense()
    skip_in_draft_(model, [1], [0])
    norm = 2 * 48
    skipped = dense_bytes(ATTENTION) + dense_bytes(MLP) + 2 * norm
    whole = weight_bytes_read(model, "target")
    assert weight_bytes_read(model, "draft") == whole - skipped


def test_looking_changes_nothing() -> None:
    model = nest_(dense())
    ids = small_models.tokens(model)
    before = model(ids).logits
    weight_bytes_read(model, "draft")
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize(
    ("policy", "view", "expected"),
    [
        ("16/16", "draft", VECTORS * 301 * 32),
        ("16/16", "target", VECTORS * 301 * 32),
        # A float32 scale, and a half or a whole byte for each of 16 numbers.
        ("kv8/kv8", "draft", VECTORS * 301 * (4 + 16)),
        ("kv4/kv8", "draft", VECTORS * 301 * (4 + 8)),
        ("kv4/kv8", "target", VECTORS * 301 * (4 + 16)),
        ("kv4/kv4", "target", VECTORS * 301 * (4 + 8)),
        ("auto(300)", "draft", VECTORS * 301 * (4 + 16)),
        ("auto(299)", "draft", VECTORS * 301 * (4 + 8)),
        ("recent(10)", "draft", VECTORS * (301 * (4 + 8) + 10 * 8)),
        ("16/16+streaming(4,60)", "draft", VECTORS * 64 * 32),
        ("16/16+streaming(4,60)", "target", VECTORS * 301 * 32),
        ("kv4/kv8+streaming(4,60)", "draft", VECTORS * 64 * (4 + 8)),
        # A short text is read whole.
        ("16/16+streaming(4,600)", "draft", VECTORS * 301 * 32),
        # The budget of the prompt, and what follows it.
        ("kv8/kv8+snapkv(75)", "draft", VECTORS * 76 * (4 + 16)),
        ("kv8/kv8+snapkv(75)", "target", VECTORS * 301 * (4 + 16)),
        # The query at position 300 reads 128 + 300 % 128 + 1 = 173 tokens as they are and a group
        # of 128 older ones quantized: float32 scales and zero points for 16 channels of its keys,
        # and for each of its values.
        ("quantspec", "draft", VECTORS * (173 * 32 + 128 * 8) + VECTORS // 2 * 8 * (16 + 128)),
        ("quantspec", "target", VECTORS * (173 * 32 + 128 * 16) + VECTORS // 2 * 8 * (16 + 128)),
    ],
)
def test_a_cache(policy: str, view: str, expected: int) -> None:
    config = dense().config
    assert kv_bytes(config, parsed(policy), view, 300, 1, 1, torch.bfloat16) == expected
    assert kv_bytes(config, parsed(policy), view, 300, 1, 3, torch.bfloat16) == 3 * expected


def test_layers_that_do_not_attend_read_no_cache() -> None:
    config = dense().config
    whole = dense_kv_bytes(config, 10, 1, torch.bfloat16)
    assert dense_kv_bytes(config, 10, 1, torch.bfloat16, skipped=[1]) == whole / 2
    read = KVRead(refinement=False)
    assert nested_kv_bytes(config, 10, 1, read, [0]) == nested_kv_bytes(config, 10, 1, read) / 2
    policy = parsed("quantspec")
    sizes = [
        kv_bytes(config, policy, "draft", 300, 1, 1, torch.bfloat16, skipped)
        for skipped in ((), (0,), (0, 1))
    ]
    assert sizes == [sizes[0], sizes[0] / 2, 0]


def test_the_memory_of_a_cache() -> None:
    model = dense()
    assert cache_bytes(model, parsed("16/16"), 300) == VECTORS * 300 * 32
    assert cache_bytes(model, parsed("kv4/kv8"), 300) == VECTORS * 300 * (4 + 16)
    quantspec = cache_bytes(model, parsed("quantspec"), 1000)
    # 8 groups of 128, of which the last 2 are never read quantized, and a buffer of 16 bits.
    planes = VECTORS * 6 * 128 * 16
    scales = VECTORS // 2 * 8 * (6 * 16 + 6 * 128)
    assert quantspec == planes + scales + VECTORS * SLOTS * 32


def test_a_result_has_the_bytes_of_both_views() -> None:
    model = nest_(dense())
    shapes = [*LINEARS, HEAD]
    result = ByteCounter(model, CONTENDERS["bitnest-kv4"]).result(100, gamma=4, new_tokens=20)
    assert (result.gamma, result.kv, result.skipped) == (4, "kv4/kv8", None)
    assert result.weight_bytes == stored_weight_bytes(model)
    assert result.cache_bytes == VECTORS * 120 * (4 + 16)
    assert result.draft is not None
    assert result.draft.total == plane_bytes(shapes, 32) + NORMS + VECTORS * 101 * (4 + 8)
    assert result.verification is not None
    target = plane_bytes(shapes, 32, 2) + NORMS
    assert result.verification.total == target + VECTORS * 105 * (4 + 16)
    assert result.step.total == target + VECTORS * 101 * (4 + 16)
    assert result.tokens_per_round is None
    assert result.bytes_per_token is None


def test_a_reference_reads_a_step_for_a_token() -> None:
    model = dense()
    result = ByteCounter(model, CONTENDERS["16-bit"]).result(100, gamma=4, new_tokens=20)
    assert (result.gamma, result.draft, result.verification) == (0, None, None)
    expected = dense_bytes([*LINEARS, HEAD]) + NORMS + VECTORS * 101 * 32
    assert result.bytes_per_token == result.step.total == expected


def test_skipped_attention_reads_no_cache() -> None:
    model = dense()
    skip_in_draft_(model, [1], [])
    contender = Contender("skipping", "16-bit", always("16/16"), skips=True)
    result = ByteCounter(model, contender).result(100, gamma=2, new_tokens=20)
    assert result.skipped == {"attention": [1], "mlp": []}
    assert result.draft is not None
    assert result.draft.cache == VECTORS // 2 * 101 * 32
    assert result.step.cache == VECTORS * 101 * 32


def test_kv_policies_have_the_bytes_of_their_reads() -> None:
    config = small_models.build("mistral").config  # a window of 8
    policy = parsed("kv8/kv8")
    expected = nested_kv_bytes(config, 31, 2, WHOLE)
    assert kv_bytes(config, policy, "target", 30, 1, 2, torch.bfloat16) == expected
    assert expected == 2 * VECTORS * 8 * (4 + 16)
