from types import SimpleNamespace
from typing import Any

import pytest
import small_models
from nested_models import nest_

from nestq.kv_policy import BASE, WHOLE, KVPolicy, KVRead, default_policy, snapkv, streaming_llm
from nestq.sparse_reads import SnapKV, StreamingLLM


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("kv8/kv8", KVPolicy("kv8")),
        ("kv4/kv8", KVPolicy("kv4")),
        ("recent(1)", KVPolicy("recent", 1)),
        ("recent(256)", KVPolicy("recent", 256)),
        ("auto(8192)", KVPolicy("auto", 8192)),
        ("quantspec", KVPolicy("quantspec")),
        ("kv4/kv4", KVPolicy("base")),
        ("16/16", KVPolicy("dense")),
        ("16/16+streaming(4,1020)", KVPolicy("dense", 0, StreamingLLM(4, 1020))),
        ("recent(8)+snapkv(512)", KVPolicy("recent", 8, SnapKV(512))),
        (KVPolicy("kv4"), KVPolicy("kv4")),
    ],
)
def test_parses_every_form(text: str, policy: KVPolicy) -> None:
    assert KVPolicy.parse(text) == policy
    assert KVPolicy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    "text", ["", "kv8", "kv8/kv4", "kv4/kv8 ", "recent", "recent()", "recent(0)", "recent(-1)",
             "quantspec(2)", "auto", "auto(x)", "auto(1)x", "KV4/KV8", None, 8, "16", "16/16+",
             "+snapkv(64)", "16/16+streaming(4)", "kv8/kv8+snapkv(64)+snapkv(64)", "16/16+snapkv"]
)  # fmt: skip
def test_other_strings_are_refused_with_the_forms(text: object) -> None:
    with pytest.raises(ValueError, match=r"'16/16', 'recent\(n\)' .* '\+snapkv\(budget\)'"):
        KVPolicy.parse(text)


@pytest.mark.parametrize(
    ("kind", "entries"), [("kv8", 1), ("recent", 0), ("auto", -1), ("kv2", 0), ("quantspec", 1)]
)
def test_impossible_policies_are_refused(kind: str, entries: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        KVPolicy(kind, entries)


@pytest.mark.parametrize(
    "text",
    ["kv8/kv8", "kv4/kv8", "recent(3)", "auto(9)", "quantspec", "16/16", "kv8/kv8+snapkv(64)"],
)
def test_the_target_reads_both_planes(text: str) -> None:
    assert KVPolicy.parse(text).read("target", 10) == WHOLE == KVRead(refinement=True, recent=0)


@pytest.mark.parametrize(
    ("text", "context_length", "read"),
    [
        ("kv8/kv8", None, WHOLE),
        ("kv4/kv8", None, BASE),
        ("recent(3)", None, KVRead(refinement=True, recent=3)),
        ("auto(9)", 9, WHOLE),
        ("auto(9)", 10, BASE),
        ("quantspec", 10, BASE),
        ("kv4/kv4", None, BASE),
        ("16/16", None, WHOLE),
        ("kv4/kv8+streaming(0,7)", None, KVRead(refinement=False, sparse=StreamingLLM(0, 7))),
        ("auto(9)+snapkv(64)", 9, KVRead(refinement=True, sparse=SnapKV(64))),
        ("recent(3)+snapkv(64)", 9, KVRead(refinement=True, recent=3, sparse=SnapKV(64))),
    ],
)
def test_what_the_draft_reads(text: str, context_length: int | None, read: KVRead) -> None:
    assert KVPolicy.parse(text).read("draft", context_length) == read


def test_auto_needs_the_context_length() -> None:
    with pytest.raises(ValueError, match="context_length must be given"):
        KVPolicy.parse("auto(9)").read("draft", None)


def test_a_target_of_four_bits() -> None:
    assert KVPolicy.parse("kv4/kv4").read("target", 10) == BASE


def test_functions_name_the_same_policies() -> None:
    assert streaming_llm(recent=1020) == KVPolicy.parse("16/16+streaming(4,1020)")
    assert streaming_llm(0, recent=8, kv="recent(3)") == KVPolicy.parse("recent(3)+streaming(0,8)")
    assert snapkv(64, kv=KVPolicy("kv4")) == KVPolicy.parse("kv4/kv8+snapkv(64)")
    assert snapkv(budget=64).stored() == KVPolicy("dense")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: streaming_llm(0, recent=0), "recent must be an int >= 1, got 0"),
        (lambda: streaming_llm(-1, recent=4), "sink must be an int >= 0, got -1"),
        (lambda: streaming_llm(4, recent=2.5), "recent must be an int >= 1, got 2.5"),
        (lambda: snapkv(32), "budget must be above 32, .* got 32"),
        (lambda: snapkv(0), "budget must be an int >= 33, got 0"),
        (lambda: snapkv("9"), "budget must be an int >= 33, got '9'"),
        (lambda: snapkv(64, kv="quantspec"), "sparse must be None for 'quantspec'"),
        (lambda: snapkv(64, kv=streaming_llm(recent=4)), "kv must be a policy without sparse"),
        (lambda: KVPolicy.parse("quantspec+streaming(4,8)"), "sparse must be None for 'quantspec'"),
        (lambda: KVPolicy.parse("16/16+streaming(0,0)"), "recent must be an int >= 1, got 0"),
        (lambda: KVPolicy.parse("16/16+snapkv(16)"), "budget must be above 32"),
        (lambda: KVPolicy("dense", 0, "streaming(4,8)"), "sparse must be a StreamingLLM"),  # type: ignore[arg-type]
    ],
)
def test_impossible_sparse_drafts_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("kv8/kv8", True), ("kv4/kv4", True), ("16/16", True), ("kv4/kv8", False),
        ("recent(3)", False), ("auto(9)", False), ("quantspec", False),
        ("16/16+streaming(4,8)", False), ("kv8/kv8+snapkv(64)", False),
    ],
)  # fmt: skip
def test_whether_drafts_read_what_the_target_reads(text: str, same: bool) -> None:
    assert KVPolicy.parse(text).drafts_as_target == same


def test_the_default_is_that_of_the_model() -> None:
    model = small_models.build("llama-gqa", num_hidden_layers=1)
    assert default_policy(model) == KVPolicy("dense")
    assert default_policy(nest_(model)) == KVPolicy("kv8")
    model.config.quantization_config = SimpleNamespace(kv="kv4/kv8+snapkv(64)")
    assert default_policy(model) == snapkv(64, kv="kv4/kv8")
