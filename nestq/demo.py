"""``nestq demo``: the whole way on a real model, from dense weights to streamed text."""

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, TextStreamer

from nestq.architectures import describe
from nestq.checkpoint import check_target, read_config, save
from nestq.data import calibration_tokens, heldout_tokens
from nestq.evaluation import (
    Evaluation,
    dtype_name,
    score_text,
)
from nestq.hf_quantizer import nested_weights
from nestq.pretrained import PACKAGED, load_model, load_weights
from nestq.quantize import quantize_
from nestq.recipes import bitnest_w4w8
from nestq.speculative import DecodingMetrics, SpeculativeOutput, speculative_generate

MODEL = PACKAGED
CALIBRATION_TOKENS = 16384
HELDOUT_TOKENS = 512


def run_demo(folder: Path, prompt: str, max_new_tokens: int, console: Console) -> None:
    """Nest SmolLM2-135M-Instruct unless ``folder`` has it, then answer and measure.

    Args:
        folder: checkpoint; made if it is missing.
        prompt: question to the chat model.
        max_new_tokens: length of the answer, at most.
        console: where to print.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if folder.exists():
        read_config(folder)  # refuses what is not a nestq checkpoint
    else:
        check_target(folder)
        _make_checkpoint(folder, device, console)
    console.print(f"loading {folder}")
    nested, tokenizer = load_model(folder)
    reference = load_weights(MODEL)
    nested.to(device)  # type: ignore[arg-type]
    reference.to(device)  # type: ignore[arg-type]

    console.print(f"\n{prompt}", style="bold")
    rendered: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    inputs = rendered.to(device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def decode(gamma: int, streamer: TextStreamer | None = None) -> SpeculativeOutput:
        output = speculative_generate(
            nested,
            **inputs,
            gamma=gamma,
            streamer=streamer,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert isinstance(output, SpeculativeOutput)
        return output

    speculative = decode(4, streamer)
    target_only = decode(0)
    start = time.perf_counter()
    generate: Any = reference.generate
    plain = generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    plain_speed = (plain.shape[1] - inputs["input_ids"].shape[1]) / (time.perf_counter() - start)
    quality = score_text(reference, nested, heldout_tokens(tokenizer, HELDOUT_TOKENS, 512))

    assert speculative.metrics is not None
    assert target_only.metrics is not None
    console.print()
    console.print(_bytes_table(nested, reference))
    console.print(
        _decoding_table(
            speculative.metrics,
            torch.equal(speculative.sequences, target_only.sequences),
            {
                f"{dtype_name(reference)} (transformers generate)": plain_speed,
                "target only": target_only.metrics.tokens_per_second,
                "speculative": speculative.metrics.tokens_per_second,
            },
        )
    )
    console.print(_quality_table(quality, dtype_name(reference)))
    if device == "cpu":
        console.print(
            "On a CPU the reference unpacks every weight at every step, so speculative decoding "
            "is slower than the dense model here; the tokens are the same on any path."
        )


def _make_checkpoint(folder: Path, device: str, console: Console) -> None:
    model, tokenizer = load_model(MODEL)
    console.print(
        f"nesting {MODEL} with {CALIBRATION_TOKENS} tokens of ShareGPT chats "
        "(the full recipe takes more; see README)"
    )
    report = quantize_(
        model,
        bitnest_w4w8(),
        calibration=calibration_tokens(tokenizer, CALIBRATION_TOKENS, max_length=512),
        tokenizer=tokenizer,
        device=device,
    )
    console.print(report.caption())
    save(model, folder, tokenizer)


def _bytes_table(nested: PreTrainedModel, reference: PreTrainedModel) -> Table:
    weights = nested_weights(nested)
    parts = {"base": 0, "refinement": 0, "scale": 0}
    for weight in weights.values():
        for name in parts:
            parts[name] += getattr(weight, name).nbytes
    dense = sum(reference.get_parameter(f"{name}.weight").nbytes for name in weights)
    embedding = describe(nested).embedding.weight
    table = Table(title="Weights")
    table.add_column("part")
    table.add_column("MiB", justify="right")
    rows = {
        f"{dtype_name(reference)} linears and head": dense,
        "base plane (draft)": parts["base"],
        "refinement plane": parts["refinement"],
        "scales": parts["scale"],
        "nested in all": sum(parts.values()),
        f"embedding, {dtype_name(embedding)} in both": embedding.nbytes,
    }
    for name, count in rows.items():
        table.add_row(name, f"{count / 2**20:.1f}")
    return table


def _decoding_table(metrics: DecodingMetrics, equal: bool, speeds: dict[str, float]) -> Table:
    table = Table(
        title=f"Decoding {metrics.tokens} tokens, gamma {metrics.gamma}",
        caption="One short answer; nestq eval measures acceptance on many.",
    )
    table.add_column("measure")
    table.add_column("value", justify="right")
    per_position = " ".join(f"{share:.2f}" for share in metrics.acceptance_per_position)
    table.add_row("slot acceptance", f"{metrics.slot_acceptance:.3f}")
    table.add_row("acceptance per position", per_position)
    table.add_row("tokens per round", f"{metrics.tokens_per_round:.2f}")
    table.add_row("output equals target-only decoding", "yes" if equal else "NO")
    for name, speed in speeds.items():
        table.add_row(f"{name}, tokens/s", f"{speed:.1f}")
    return table


def _quality_table(quality: Evaluation, dtype: str) -> Table:
    table = Table(title=f"Perplexity on {quality.scores[0].predictions} held-out chat positions")
    table.add_column("model")
    table.add_column("perplexity", justify="right")
    for score in quality.scores:
        name = f"{dtype} (dequantized Q4_1)" if score.name == "16-bit" else score.name
        table.add_row(name, f"{score.perplexity:.2f}")
    return table
