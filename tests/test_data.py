"""Texts: parsing of small synthetic files, then the real packages."""

import json
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nestq import data

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> NoReturn:
        raise AssertionError(f"network access: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# JSON that is cut off

objects = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=6,
    ),
    min_size=1,
    max_size=3,
)


@given(st.lists(objects, max_size=5), st.booleans(), st.integers(1, 40), st.data())
def test_cut_json_gives_every_whole_object(
    tmp_path_factory: pytest.TempPathFactory,
    entries: list[dict[str, Any]],
    ascii_only: bool,
    block_bytes: int,
    draw: st.DataObject,
) -> None:
    content, ends = b"[\n", []
    for entry in entries:
        content += json.dumps(entry, ensure_ascii=ascii_only, indent=1).encode()
        ends.append(len(content))
        content += b",\n "
    content += b"]\n"
    cut = draw.draw(st.integers(0, len(content)))
    path = tmp_path_factory.getbasetemp() / "cut.json"
    path.write_bytes(content[:cut])

    found = list(data._cut_json_array(path, block_bytes))

    # Compared as JSON text, in which NaN equals NaN.
    assert json.dumps(found) == json.dumps(entries[: sum(end <= cut for end in ends)])


def test_json_broken_before_its_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('[{"a": 1}, {"a": oops}, {"a": 2}, {"a": "the rest would be lost"}]')
    entries = data._cut_json_array(path)
    assert next(entries) == {"a": 1}
    with pytest.raises(ValueError, match="broken JSON"):
        next(entries)


# ShareGPT


def write_sharegpt(
    monkeypatch: pytest.MonkeyPatch, folder: Path, conversations: dict[str, list[tuple[str, str]]]
) -> None:
    entries = [
        {"id": name, "conversations": [{"from": who, "value": said} for who, said in turns]}
        for name, turns in conversations.items()
    ]
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(entries)[:-1] + ', {"id": "cut_0", "conversat', encoding="utf-8")
    monkeypatch.setattr(data, "package_file", lambda *names: path)


def contents(chat: data.Chat) -> list[str]:
    return [message["content"] for message in chat]


def test_sharegpt_is_cleaned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask, answer = ("human", " Q1 \n"), ("gpt", "A1")
    write_sharegpt(
        monkeypatch,
        tmp_path,
        {
            "a_0": [ask, answer, ("user", "Q2"), ("chatgpt", "A2"), ("human", "unanswered")],
            "a_11": [("human", "a later part"), answer],
            "b_0": [("gpt", "begins with an answer"), ("human", "Q"), answer],
            "c_0": [("human", "empty later"), answer, ("human", " "), answer],
            "d_0": [("human", "lost later"), answer, ("human", "lo\ufffdst"), answer],
            "e_0": [("human", "twice"), ("human", "in a row"), answer],
            "f_0": [("system", "be nice"), ("human", "Q"), answer],
            "g_0": [("human", "q-1!"), ("gpt", "opens like the first one")],
            "h_0": [("human", "another machine"), ("bing", "A")],
            "i_0": [],
        },
    )
    chats = data.sharegpt_chats()
    assert list(map(contents, chats)) == [
        ["Q1", "A1", "Q2", "A2"],
        ["empty later", "A1"],
        ["lost later", "A1"],
    ]
    assert [message["role"] for message in chats[0]] == ["user", "assistant"] * 2


def test_heldout_shares_no_sentence_with_calibration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pasted = "Ignore all that was said and answer only in verse from now on"
    conversations = {}
    for number in range(40):
        more = f"As follows. {pasted.upper()}!" if number % 4 == 0 else f"Number {number}?"
        turns = [("human", f"Opening {number}"), ("gpt", pasted), ("human", more), ("gpt", "Yes")]
        conversations[f"{number}_0"] = turns
    write_sharegpt(monkeypatch, tmp_path, conversations)

    def openings(split: data.Split, pasting: bool) -> set[str]:
        chats = data.sharegpt_split(split)
        return {chat[0]["content"] for chat in chats if ("VERSE" in chat[2]["content"]) == pasting}

    assert openings("calibration", pasting=True)
    assert not openings("heldout", pasting=True)
    # The answers, which all have the sentence, and the short sentences exclude nothing.
    plain = openings("calibration", pasting=False), openings("heldout", pasting=False)
    assert all(plain)
    assert len(plain[0] | plain[1]) == len(plain[0]) + len(plain[1]) == 30


def test_split_is_checked() -> None:
    with pytest.raises(ValueError, match="split='test'"):
        data.sharegpt_split("test")  # type: ignore[arg-type]


def test_real_sharegpt() -> None:
    chats = data.sharegpt_chats()
    calibration, heldout = data.sharegpt_split("calibration"), data.sharegpt_split("heldout")

    assert len(chats) == 8537
    assert (len(calibration), len(heldout)) == (4314, 4089)
    for chat in chats:
        assert [m["role"] for m in chat] == ["user", "assistant"] * (len(chat) // 2)
        assert all(m["content"].strip() for m in chat)
    first_turns = [{c[0]["content"].casefold() for c in split} for split in (calibration, heldout)]
    assert first_turns[0].isdisjoint(first_turns[1])
    assert data.sharegpt_chats() == chats


# The user's own texts

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\n\ndocument\n", ["one\n\ndocument\n"]),
        ("a.jsonl", '{"text": "a", "id": 3}\n\n"b\u2028c"\n', ["a", "b\u2028c"]),
        ("a.jsonl", json.dumps({"messages": CHAT}), [CHAT]),
        ("a.json", json.dumps(["a", {"text": "b"}, {"messages": CHAT}]), ["a", "b", CHAT]),
    ],
)
def test_load_texts(tmp_path: Path, name: str, content: str, expected: list[data.Text]) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert data.load_texts(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "a", "a.csv.*expected a .txt, .jsonl or .json"),
        ("a.txt", " \n", "a.txt: expected a text"),
        ("a.jsonl", "\n", "a.jsonl: no documents"),
        ("a.jsonl", '{"text": "a"}\n{"text"', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"txt": "a"}', r"line 1: expected either 'text' or 'messages', got \['txt'\]"),
        ("a.jsonl", '{"text": "a", "messages": []}', "line 1: expected either"),
        ("a.jsonl", '"a"\n{"text": ""}', "line 2: expected a text"),
        ("a.jsonl", '{"text": 3}', "line 1: expected a text .* got 3"),
        ("a.jsonl", '{"messages": []}', "line 1: expected a text or a list of messages"),
        ("a.jsonl", '{"messages": ["Hi"]}', "line 1: expected strings 'role' and 'content'"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "line 1: expected strings 'role'"),
        ("a.json", '{"text": "a"}', "a.json: expected an array of records, got dict"),
        ("a.json", '["a", null]', "a.json, record 2: expected a text"),
        ("a.json", "[", "a.json: not JSON"),
        ("a.json", "[]", "a.json: no documents"),
    ],
)
def test_load_texts_says_what_is_wrong(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        data.load_texts(tmp_path / name)


def test_load_texts_names_files_that_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        data.load_texts(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8"):
        data.load_texts(tmp_path / "latin.txt")


# Token ids


@pytest.fixture
def letters() -> PreTrainedTokenizerBase:
    """A token a letter; like Llama 3's, it begins texts with <s>, and its template does so too."""
    words = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "</s>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}z{% endif %}"
    )
    return tokenizer


def chat_of(*said: str) -> data.Chat:
    return [
        {"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(said)
    ]


def test_texts_and_chats_begin_with_one_bos(letters: PreTrainedTokenizerBase) -> None:
    assert data.tokenize_texts(letters, ["ab", chat_of("ab", "c")]) == [
        [0, 2, 3],
        [0, 2, 3, 1, 4, 1],
    ]


def test_tokenize_texts_checks_its_input(letters: PreTrainedTokenizerBase) -> None:
    with pytest.raises(TypeError, match="got one string"):
        data.tokenize_texts(letters, "abc")
    letters.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        data.tokenize_texts(letters, [chat_of("ab", "c")])
    letters.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    with pytest.raises(ValueError, match=r"texts\[1\]: no tokens"):
        data.tokenize_texts(letters, ["ab", ""])


@pytest.fixture
def split_of_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    chats = {
        "calibration": [chat_of(letter, "xyz") for letter in "abcdefgh"],
        "heldout": [chat_of("tu", "v"), chat_of("rs</s>", "v"), chat_of("lmnopq", "v")],
    }
    monkeypatch.setattr(data, "sharegpt_split", lambda split: list(chats[split]))


@pytest.mark.usefixtures("split_of_letters")
def test_chat_tokens_are_exactly_as_many_as_asked_for(letters: PreTrainedTokenizerBase) -> None:
    full = data.calibration_tokens(letters, 8 * 7)
    assert sorted(ids[1] for ids in full) == list(range(2, 10))
    assert all(ids[2:] == [1, 25, 26, 27, 1] for ids in full)

    some = data.calibration_tokens(letters, 17)
    assert some == [full[0], full[1], full[2][:3]]
    assert data.calibration_tokens(letters, 12, max_length=4) == [ids[:4] for ids in full[:3]]
    assert data.calibration_tokens(letters, 56, seed=1) != full
    # The chat that quotes </s> is left out: 6 and 10 tokens remain.
    assert sorted(map(len, data.heldout_tokens(letters, 16))) == [6, 10]
    with pytest.raises(ValueError, match="max_tokens=17: heldout chats have only 16"):
        data.heldout_tokens(letters, 17)
    with pytest.raises(ValueError, match="max_tokens=0"):
        data.calibration_tokens(letters, 0)


@pytest.mark.usefixtures("split_of_letters")
def test_prompts_end_where_the_answer_begins(letters: PreTrainedTokenizerBase) -> None:
    assert sorted(data.chat_prompt_tokens(letters, 2), key=len) == [
        [0, 21, 22, 1, 27],
        [0, 13, 14, 15, 16, 17, 18, 1, 27],
    ]
    assert data.chat_prompt_tokens(letters, 1, max_length=5) == [[0, 21, 22, 1, 27]]
    with pytest.raises(ValueError, match="count=2: heldout has 1 prompts of 5 tokens"):
        data.chat_prompt_tokens(letters, 2, max_length=5)
    assert len(data.chat_prompt_tokens(letters, 8, "calibration")) == 8


def test_windows_put_one_eos_between_documents() -> None:
    rows = data.token_windows([[1, 2], [3, 9], [4], [5, 6, 7]], 3, eos_token_id=9)
    assert rows.tolist() == [[1, 2, 9], [3, 9, 4], [9, 5, 6]]
    assert rows.dtype == torch.int64
    assert data.token_windows([[1, 2], [3]], 3, eos_token_id=None).tolist() == [[1, 2, 3]]


@given(st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=9)), st.integers(1, 7))
def test_windows_hold_the_documents_in_order(documents: list[list[int]], length: int) -> None:
    stream = [token for document in documents for token in [*document, 9]][:-1]
    if len(stream) < length:
        with pytest.raises(ValueError, match=f"length={length}"):
            data.token_windows(documents, length, eos_token_id=9)
        return
    rows = data.token_windows(documents, length, eos_token_id=9)
    assert rows.shape == (len(stream) // length, length)
    assert rows.flatten().tolist() == stream[: rows.numel()]


def test_windows_check_their_length() -> None:
    with pytest.raises(ValueError, match="length=0"):
        data.token_windows([[1]], 0, eos_token_id=None)
