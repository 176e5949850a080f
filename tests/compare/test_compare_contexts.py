"""Long prompts: their length, and that what they ask is not answered in them."""

import pytest
import tiny_checkpoint

from nestq.compare.contexts import contexts_of, long_contexts
from nestq.data import Chat, chat_prompt_tokens

SUBJECTS = ("apples", "boats", "clouds", "dice", "eagles", "forks", "glass", "hills", "ice", "jam")


def chats(split: str) -> list[Chat]:
    """In place of ShareGPT, whose file takes seconds to read."""
    assert split == "heldout"
    return [
        [
            {"role": "user", "content": f"Tell me about {one} and {other}."},
            {"role": "assistant", "content": f"Much is known about {one} and {other}. " * 20},
        ]
        for one in SUBJECTS
        for other in SUBJECTS
    ]


@pytest.mark.parametrize(("count", "code"), [(5, 2), (1, 0)])
def test_prompts_end_with_questions_that_they_do_not_answer(
    count: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestq.data.sharegpt_split", chats)
    tokenizer = tiny_checkpoint.tokenizer()

    rows = long_contexts(tokenizer, count, 400).tolist()

    assert [len(row) for row in rows] == [400] * count
    questions = chat_prompt_tokens(tokenizer, count - code, max_length=200)
    for row, question in zip(rows[::2], questions, strict=True):
        assert row[-len(question) :] == question
    for row in rows[1::2]:
        assert "Complete this Python function" in tokenizer.decode(row)[-900:]
    stream = " ".join(str(token) for row in rows for token in row)
    for question in questions:
        assert stream.count(" ".join(map(str, question))) == 1


def test_too_few_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestq.data.sharegpt_split", chats)
    with pytest.raises(ValueError, match="heldout chats have only"):
        long_contexts(tiny_checkpoint.tokenizer(), 4, 100_000)


def test_texts_of_ones_own_are_cut_into_pieces() -> None:
    tokenizer = tiny_checkpoint.tokenizer()
    text = "one two three four five six seven eight nine ten " * 20
    rows = contexts_of(tokenizer, [text], 3, 40)
    assert rows.shape == (3, 40)
    assert rows.flatten().tolist() == tokenizer(text)["input_ids"][:120]
    with pytest.raises(ValueError, match="9 prompts of 40 tokens are needed, and they have"):
        contexts_of(tokenizer, [text], 9, 40)
