"""Long held-out contexts: what every contender continues, and what targets are scored on."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from nestq.data import (
    Text,
    chat_prompt_tokens,
    code_prompt_tokens,
    heldout_tokens,
    token_windows,
    tokenize_texts,
)

# Questions are short, so that most of a context is what comes before them.
LONGEST_QUESTION = 256
# Several chats fit into a context.
LONGEST_CHAT = 1024
# A prompt must have room for a question and for a chat before it.
SHORTEST_CONTEXT = 32


def long_contexts(tokenizer: Tokenizer, count: int, length: int) -> Tensor:
    """Prompts of one length: held-out chats one after the other, and at the end a question.

    Questions are first messages of held-out chats and requests to complete a function of HumanEval,
    half each. The chats before them are others.

    Args:
        tokenizer: with a chat template.
        count: of prompts.
        length: of each, in tokens.

    Returns:
        int64 ``[count, length]``.

    Raises:
        ValueError: the tokenizer has no chat template, or there is not so much text.
    """
    limit = min(LONGEST_QUESTION, length // 2)
    short = [question for question in code_prompt_tokens(tokenizer) if len(question) <= limit]
    code = short[: count // 2]
    chats = chat_prompt_tokens(tokenizer, count - len(code), max_length=limit)
    questions = [question for pair in zip(chats, code, strict=False) for question in pair]
    questions += chats[len(code) :]
    needed = sum(length - len(question) for question in questions)
    # The chats that begin with the questions of this seed are among them, and are left out.
    known = {tuple(question) for question in chats}
    room = needed + len(chats) * LONGEST_CHAT
    stream = [
        token
        for chat in heldout_tokens(tokenizer, room, LONGEST_CHAT)
        if not any(tuple(chat[: len(question)]) == question for question in known)
        for token in chat
    ]
    if len(stream) < needed:
        raise ValueError(
            f"contexts: {count} of {length} tokens need {needed} of held-out chats, and there are "
            f"only {len(stream)}"
        )
    rows, start = [], 0
    for question in questions:
        before = length - len(question)
        rows.append(stream[start : start + before] + question)
        start += before
    return torch.tensor(rows)


def contexts_of(tokenizer: Tokenizer, texts: Sequence[Text], count: int, length: int) -> Tensor:
    """Prompts from texts of one's own, cut into pieces of one length.

    Args:
        tokenizer: of the model.
        texts: documents or chats.
        count: of prompts.
        length: of each, in tokens.

    Returns:
        int64 ``[count, length]``.

    Raises:
        ValueError: there is not so much text.
    """
    windows = token_windows(tokenize_texts(tokenizer, texts), length, tokenizer.eos_token_id)
    if len(windows) < count:
        raise ValueError(
            f"texts: {count} prompts of {length} tokens are needed, and they have {len(windows)}"
        )
    return windows[:count]
