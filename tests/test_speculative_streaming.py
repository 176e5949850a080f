"""Streamers, and what is left behind when a call ends, in whatever way."""

from threading import Thread
from typing import Any

import pytest
import small_models
import torch
from speculative_runs import NEW, nested_model, padded_prompts, run
from test_speculative_stopping import letters_tokenizer
from torch import Tensor
from transformers import PreTrainedModel, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from nestq.speculative import speculative_generate
from nestq.view import current_view


class Recorder(BaseStreamer):
    """Keeps what it gets, and how often the target had run by then."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.target_passes: list[int] = []
        self.passes = 0
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not self.ends
        assert value.device.type == "cpu"
        self.values.append(value.clone())
        self.target_passes.append(self.passes)

    def end(self) -> None:
        self.ends += 1

    def watch(self, model: PreTrainedModel) -> Any:
        def hook(*_: Any) -> None:
            self.passes += current_view() == "target"

        return model.register_forward_hook(hook)


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_tokens_come_one_by_one_as_soon_as_they_are_accepted(gamma: int) -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 1, 9)
    streamer = Recorder()
    handle = streamer.watch(model)
    output = run(model, tokens, gamma, streamer=streamer)
    handle.remove()
    prompt, *generated = streamer.values
    assert torch.equal(prompt, tokens)
    assert [value.shape for value in generated] == [(1,)] * NEW
    assert torch.equal(torch.cat(generated), output.sequences[0, 9:])
    assert streamer.ends == 1
    # The prompt, then after each verification (the prefill is a pass of the target too) its tokens.
    passes = streamer.target_passes[1:]
    assert sorted(set(passes)) == list(range(2, 2 + output.metrics.verifications))
    assert max(passes.count(n) for n in passes) <= gamma + 1


def test_rows_of_a_batch_come_in_columns() -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 3, 1], 9)
    end = int(run(model, tokens, gamma=0, attention_mask=mask).sequences[0, 9 + 5])
    streamer = Recorder()
    output = run(
        model, tokens, gamma=3, attention_mask=mask, eos_token_id=end, streamer=streamer
    ).sequences
    assert torch.equal(torch.stack(streamer.values[1:], dim=1), output[:, 9:])
    assert (output[:, -1] == 0).any()  # rows of different length


def test_text_of_a_thread() -> None:
    model = nested_model()
    tokenizer = letters_tokenizer(97)
    tokens = small_models.tokens(model, 1, 9)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(
        target=speculative_generate,
        args=(model, tokens),
        kwargs={"gamma": 4, "max_new_tokens": NEW, "streamer": streamer},
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(run(model, tokens, gamma=0).sequences[0, 9:])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("view", ["draft", "target"])
def test_an_error_leaves_the_model_as_it_was(error: type[BaseException], view: str) -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 1, 9)
    expected = run(model, tokens, gamma=2).sequences
    before = model.config.to_dict(), model.config._attn_implementation, model.generation_config
    streamer = Recorder()

    def hook(*_: Any) -> None:
        if len(streamer.values) > 3 and current_view() == view:
            raise error("stop")

    handle = model.register_forward_hook(hook)
    with pytest.raises(error, match="stop"):
        speculative_generate(model, tokens, gamma=2, max_new_tokens=9, streamer=streamer)
    handle.remove()
    assert streamer.ends == 1
    assert current_view() == "target"
    assert before == (
        model.config.to_dict(),
        model.config._attn_implementation,
        model.generation_config,
    )
    assert torch.equal(run(model, tokens, gamma=2).sequences, expected)
    assert torch.isfinite(model(tokens).logits).all()
