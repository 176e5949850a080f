"""``nestq generate --chat`` with lines from standard input."""

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from nestq import chat, cli
from nestq.chat import AnswerStream, Conversation, run_chat
from nestq.pretrained import load_model
from nestq.speculative import speculative_generate

SPEED = (
    r"^\d+ tokens, \d+\.\d tokens/s, \d\.\d\d of draft tokens accepted, \d\.\d\d tokens a round$"
)

Type = Callable[..., str]


@pytest.fixture
def typed(nested: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    """Runs the command on lines, and gives what it prints."""

    def run(lines: str, *options: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        arguments = ["generate", nested, "--chat", "--max-new-tokens", "6", *options]
        assert cli.main(arguments) == 0
        return capsys.readouterr().out

    return run


def answers_of(printed: str) -> list[str]:
    """What stands between a prompt and the line about the answer before it."""
    turns = printed.split("> ")[1:]
    return [re.sub(SPEED, "", turn, flags=re.M).strip("\n") for turn in turns]


def test_a_conversation(typed: Type) -> None:
    printed = typed("Why is the sky blue?\n\nAnd at night?\n/exit\nnot read\n", "--gamma", "2")
    first, nothing, second, last = answers_of(printed)
    assert first
    assert second
    assert nothing == last == ""
    assert len(re.findall(SPEED, printed, re.M)) == 2
    assert "/reset" in printed.splitlines()[0]
    # The second answer depends on the first turn, unless that is forgotten.
    forgotten = answers_of(typed("Why is the sky blue?\n/reset\nAnd at night?\n"))
    assert forgotten[0] == first
    assert forgotten[2] == answers_of(typed("And at night?\n"))[0] != second


def test_the_end_of_the_input_ends_it(typed: Type) -> None:
    assert typed("").endswith("> \n")
    assert typed("Hello").count("tokens/s") == 1


def test_unknown_commands_are_no_turns(typed: Type) -> None:
    printed = typed("/help\n/exit\n")
    assert "/help: no command; /reset forgets" in printed
    assert "tokens/s" not in printed


def test_samples_and_gamma_0(typed: Type) -> None:
    first = typed("Hello\n", "--seed", "1")
    assert answers_of(first) == answers_of(typed("Hello\n", "--seed", "1"))
    alone = typed("Hello\nAnd you?\n", "--gamma", "0", "--kv", "quantspec")
    assert len(re.findall(r"^6 tokens, \d+\.\d tokens/s$", alone, re.M)) == 2


def test_a_prompt_is_needed_without_chat(nested: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", nested]) == 2
    assert capsys.readouterr().err == "nestq generate: a prompt is needed without --chat\n"


@pytest.fixture
def conversation(nested: str) -> Conversation:
    model, tokenizer = load_model(nested)
    return Conversation(model, tokenizer, "kv8/kv8", 6, gamma=3, do_sample=False)


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions that each call finds in the cache."""
    seen: list[int] = []

    def spy(model: Any, ids: Tensor, **options: Any) -> Any:
        seen.append(int(options["cache"].lengths))
        alone = {
            name: value for name, value in options.items() if name not in ("cache", "streamer")
        }
        output = speculative_generate(model, ids, **options)
        assert torch.equal(output.sequences, speculative_generate(model, ids, **alone).sequences)
        return output

    monkeypatch.setattr(chat, "speculative_generate", spy)
    return seen


def test_turns_go_on_with_the_cache(conversation: Conversation, prefills: list[int]) -> None:
    """And give what the whole conversation gives without one."""
    for text in ("Why is the sky blue?", "And at night?"):
        assert conversation.answer(text) is not None
    conversation.reset()
    conversation.answer("Why is grass green?")
    first, second, third = prefills
    assert first == 0
    assert 20 < third < second  # the template's beginning, and "Why is"


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Ctrl-C at the token number ``count`` of an answer."""
    put = AnswerStream.put

    def interrupted(self: AnswerStream, value: Tensor) -> None:
        put(self, value)
        if len(self.tokens) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerStream, "put", interrupted)


def test_ctrl_c_stops_an_answer_only(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        patch.setattr("sys.stdin", io.StringIO("Why is the sky blue?\n"))
        run_chat(conversation, Console(markup=False))
    assert "stopped" in capsys.readouterr().out.splitlines()
    assert conversation._cache is not None
    assert conversation._cache.lengths.tolist() == [len(conversation._known) - 1]
    question, answer = conversation.messages
    assert question["content"] == "Why is the sky blue?"
    assert conversation.tokenizer(answer["content"])["input_ids"]

    monkeypatch.setattr("sys.stdin", io.StringIO("And at night?\n/exit\n"))
    run_chat(conversation, Console(markup=False))
    assert "tokens/s" in capsys.readouterr().out
    assert len(conversation.messages) == 4


def test_an_answer_after_a_stopped_one_is_that_of_the_conversation(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, prefills: list[int]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        assert conversation.answer("Why is the sky blue?") is None
    assert conversation.answer("And at night?") is not None  # compared by `prefills`
    assert prefills[1] > 20


def test_a_conversation_that_is_too_long(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation.answer("Hello")
    before = list(conversation.messages)
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 3000 + "\n"))
    run_chat(conversation, Console(markup=False))
    printed = " ".join(capsys.readouterr().out.split())  # it is wrapped
    assert "the conversation has 30" in printed
    assert "/reset begins another one" in printed
    assert conversation.messages == before


def test_a_tokenizer_without_a_template(conversation: Conversation) -> None:
    conversation.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="--chat needs a tokenizer with a chat template"):
        run_chat(conversation, Console())
