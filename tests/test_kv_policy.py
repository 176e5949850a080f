import pytest

from nestq.kv_policy import WHOLE, KVPolicy, KVRead

BASE = KVRead(refinement=False)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("kv8/kv8", KVPolicy("kv8")),
        ("kv4/kv8", KVPolicy("kv4")),
        ("recent(1)", KVPolicy("recent", 1)),
        ("recent(256)", KVPolicy("recent", 256)),
        ("auto(8192)", KVPolicy("auto", 8192)),
        ("quantspec", KVPolicy("quantspec")),
        (KVPolicy("kv4"), KVPolicy("kv4")),
    ],
)
def test_parses_every_form(text: str, policy: KVPolicy) -> None:
    assert KVPolicy.parse(text) == policy


@pytest.mark.parametrize(
    "text", ["", "kv8", "kv8/kv4", "kv4/kv8 ", "recent", "recent()", "recent(0)", "recent(-1)",
             "quantspec(2)", "auto", "auto(x)", "auto(1)x", "KV4/KV8", None, 8]
)  # fmt: skip
def test_other_strings_are_refused_with_the_forms(text: object) -> None:
    with pytest.raises(ValueError, match=r"'kv8/kv8', 'kv4/kv8', 'recent\(n\)' or 'auto\(n\)'"):
        KVPolicy.parse(text)


@pytest.mark.parametrize(
    ("kind", "entries"), [("kv8", 1), ("recent", 0), ("auto", -1), ("kv2", 0), ("quantspec", 1)]
)
def test_impossible_policies_are_refused(kind: str, entries: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        KVPolicy(kind, entries)


@pytest.mark.parametrize("text", ["kv8/kv8", "kv4/kv8", "recent(3)", "auto(9)", "quantspec"])
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
    ],
)
def test_what_the_draft_reads(text: str, context_length: int | None, read: KVRead) -> None:
    assert KVPolicy.parse(text).read("draft", context_length) == read


def test_auto_needs_the_context_length() -> None:
    with pytest.raises(ValueError, match="context_length must be given"):
        KVPolicy.parse("auto(9)").read("draft", None)
