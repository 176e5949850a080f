"""A chat in a terminal: lines in, streamed answers out, one KV cache for the conversation."""

from contextlib import suppress
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from nestq.kv_cache import cache_keyword
from nestq.kv_caches import can_continue, new_cache
from nestq.kv_policy import KVPolicy, default_policy
from nestq.speculative import DecodingMetrics, speculative_generate
from nestq.speculative.requests import MAX_GAMMA

PROMPT = "> "
COMMANDS = "/reset forgets the conversation, /exit ends it, Ctrl-C stops an answer"


class AnswerStream(TextStreamer):
    """Prints an answer as it comes, and keeps its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt ``[1, n]``, then a token ``[1]`` at a time."""
        if not self.next_tokens_are_prompt:
            self.tokens += value.tolist()
        super().put(value)


class Conversation:
    """Turns of a user and a model, and a cache of what the model has read and written.

    The whole conversation is put in the chat template at each turn; what the cache has of it is not
    read again.

    Args:
        model: nested, on the CPU or one GPU.
        tokenizer: with a chat template.
        kv: what is cached and what drafts read of it; None for what the model asks for.
        max_new_tokens: of an answer.
        **options: of ``speculative_generate``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        kv: str | None,
        max_new_tokens: int,
        **options: Any,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.messages: list[dict[str, str]] = []
        self._policy = default_policy(model) if kv is None else KVPolicy.parse(kv)
        self._max_new_tokens = max_new_tokens
        self._options = options
        self._cache: Any = None
        # Tokens whose first ``cache.lengths`` are in the cache.
        self._known: list[int] = []

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = []

    def answer(self, text: str) -> DecodingMetrics | None:
        """Print the answer to a text, and add both to the conversation.

        Returns:
            What decoding did; None if Ctrl-C stopped it.

        Raises:
            ValueError: the conversation is longer than the model's context; the turn is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        inputs: Any = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        prompt = inputs["input_ids"][0].tolist()
        new_tokens = min(self._max_new_tokens, self._context() - len(prompt))
        if new_tokens < 1:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, and the model's context is "
                f"{self._context()}: /reset begins another one"
            )
        stream = AnswerStream(self.tokenizer)
        metrics = None
        try:
            output: Any = speculative_generate(
                self.model,
                inputs["input_ids"].to(self.model.device),
                kv=self._policy,
                max_new_tokens=new_tokens,
                streamer=stream,
                return_dict_in_generate=True,
                **self._cache_for(prompt, new_tokens),
                **self._options,
            )
            metrics = output.metrics
        except KeyboardInterrupt:
            pass  # what was printed is the answer
        finally:
            self._known = prompt + stream.tokens
            if self._cache is not None:
                # A stopped round may have kept tokens that did not get to be printed.
                self._cache.lengths.clamp_(max=len(self._known) - 1)
        answer: Any = self.tokenizer.decode(stream.tokens, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return metrics

    def _context(self) -> int:
        config = self.model.config.get_text_config(decoder=True)
        return config.max_position_embeddings

    def _cache_for(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """The cache as an argument, rolled back to where the prompt parts from what it has."""
        if not can_continue(self._policy):
            return {}  # it cannot be continued
        needed = len(prompt) + new_tokens + MAX_GAMMA + 1
        if self._cache is None:
            kind = self.model.device, self.model.dtype
            self._cache = new_cache(self._policy, self.model.config, needed, 1, *kind)
        elif needed > self._cache.get_max_length():
            # With room to spare, so that it does not grow at every turn.
            self._cache.grow(needed * 3 // 2)
        same = 0
        for known, token in zip(self._known, prompt[:-1], strict=False):
            if known != token:
                break
            same += 1
        self._cache.lengths.clamp_(max=same)
        return {cache_keyword(self.model): self._cache}


def run_chat(conversation: Conversation, console: Console) -> None:
    """Read lines from standard input until its end or ``/exit``, and answer them."""
    if conversation.tokenizer.chat_template is None:
        raise ValueError("--chat needs a tokenizer with a chat template, and the model's has none")
    with suppress(ImportError):
        import readline  # noqa: F401 (lets input() edit lines)

    console.print(COMMANDS, style="dim", highlight=False)
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            console.print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            console.print(f"{line}: no command; {COMMANDS}", style="dim", highlight=False)
        elif line:
            _answer(conversation, line, console)


def _answer(conversation: Conversation, line: str, console: Console) -> None:
    try:
        metrics = conversation.answer(line)
    except ValueError as error:
        console.print(str(error), style="dim", highlight=False)
        return
    console.print("stopped" if metrics is None else _speed(metrics), style="dim", highlight=False)


def _speed(metrics: DecodingMetrics) -> str:
    """One line: what a user may want to know of an answer."""
    parts = [f"{metrics.tokens} tokens", f"{metrics.tokens_per_second:.1f} tokens/s"]
    if metrics.slot_acceptance is not None and metrics.tokens_per_round is not None:
        parts.append(f"{metrics.slot_acceptance:.2f} of draft tokens accepted")
        parts.append(f"{metrics.tokens_per_round:.2f} tokens a round")
    return ", ".join(parts)
