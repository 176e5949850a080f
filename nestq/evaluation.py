"""Quality of a nested model beside its 16-bit original and plain W8A8, on held-out text."""

import copy
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torchao
import transformers
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from nestq import __version__
from nestq.attention import nested_attention_implementation
from nestq.data import (
    chat_prompt_tokens,
    code_prompt_tokens,
    heldout_tokens,
    humaneval_prompts,
    tokenize_texts,
)
from nestq.kv_cache import NestedKVCache
from nestq.quantize import quantize_
from nestq.recipes import RotationChoice, w8a8
from nestq.speculative import DecodingMetrics, SpeculativeOutput, speculative_generate
from nestq.speculative.round import NestedForward
from nestq.view import View

NEW_TOKENS_A_PROMPT = 128

Logits = Callable[[Tensor], Tensor]  # token ids [1, n] -> logits [1, n, V]


@dataclass
class ModelScore:
    """Next-token prediction of one model on given text.

    Attributes:
        name: of the model or view.
        nats: summed cross entropy.
        predictions: tokens predicted.
        agreements: positions at which its most likely token is the 16-bit model's.
    """

    name: str
    nats: float = 0.0
    predictions: int = 0
    agreements: int = 0

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean cross entropy."""
        return math.exp(self.nats / self.predictions)

    @property
    def agreement(self) -> float:
        """Share of positions at which its most likely token is the 16-bit model's."""
        return self.agreements / self.predictions

    def add(self, logits: Tensor, tokens: Tensor, choices: Tensor) -> Tensor:
        """Count a sequence; returns the model's own choices ``[n - 1]``."""
        own = logits[0, :-1].argmax(-1)
        self.nats += F.cross_entropy(logits[0, :-1].float(), tokens[0, 1:], reduction="sum").item()
        self.predictions += own.numel()
        self.agreements += int((own == choices).sum())
        return own


@dataclass
class Evaluation:
    """What ``nestq eval`` prints.

    Attributes:
        scores: one a model.
        draft_target_agreements: text positions at which draft and target choose the same token.
        generation: metrics of speculative decoding, summed over all prompts; None if not run.
    """

    scores: list[ModelScore]
    draft_target_agreements: int = 0
    generation: DecodingMetrics | None = field(default=None)

    @property
    def draft_target_agreement(self) -> float:
        """Share of text positions at which draft and target choose the same token."""
        return self.draft_target_agreements / self.scores[0].predictions

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON values."""
        return {
            "text_tokens": self.scores[0].predictions,
            "models": [
                {**asdict(s), "perplexity": s.perplexity, "agreement": s.agreement}
                for s in self.scores
            ],
            "draft_target_agreement": self.draft_target_agreement,
            "generation": None if self.generation is None else self.generation.to_dict(),
        }

    def quality_table(self) -> Table:
        """One row a model, for ``rich``."""
        quality = Table(title=f"Next token on {self.scores[0].predictions} held-out positions")
        quality.add_column("model")
        for header in ("perplexity", "against 16-bit", "same choice as 16-bit"):
            quality.add_column(header, justify="right")
        first = self.scores[0].perplexity
        for score in self.scores:
            quality.add_row(
                score.name,
                f"{score.perplexity:.3f}",
                f"{score.perplexity / first - 1:+.2%}",
                f"{score.agreement:.4f}",
            )
        quality.add_row("draft = target", "", "", f"{self.draft_target_agreement:.4f}")
        return quality


def generation_table(metrics: DecodingMetrics) -> Table:
    """Acceptance, for ``rich``."""
    per_position = metrics.acceptance_per_position
    table = Table(title=f"Speculative decoding: {metrics.tokens} tokens, gamma {metrics.gamma}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("single-token agreement (first draft position)", f"{per_position[0]:.4f}")
    table.add_row("accepted up to each position", " ".join(f"{p:.3f}" for p in per_position))
    table.add_row("slot acceptance", f"{metrics.slot_acceptance:.4f}")
    table.add_row("tokens per round", f"{metrics.tokens_per_round:.3f}")
    return table


def dtype_name(of: PreTrainedModel | Tensor) -> str:
    """Such as ``"bfloat16"``."""
    return str(of.dtype).removeprefix("torch.")


def versions() -> dict[str, str]:
    """Of this package and of those that its results depend on."""
    return {
        "nestq": __version__,
        "torch": torch.__version__,
        "torchao": torchao.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def made_by(
    command: str, reference: PreTrainedModel, nested: PreTrainedModel, recipe: dict[str, Any]
) -> dict[str, Any]:
    """How a result was made, as JSON values: a file of results speaks for itself."""
    on_gpu = nested.device.type == "cuda"
    return {
        "command": command,
        "versions": versions(),
        "machine": {
            "cpu": platform.machine(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name(nested.device) if on_gpu else None,
        },
        "dtype": {
            "reference": dtype_name(reference),
            "nested": dtype_name(nested),
        },
        "recipe": recipe,
    }


def nested_logits(model: PreTrainedModel, view: View) -> Logits:
    """Logits of a view as decoding computes them, with the nested KV cache."""

    def logits(tokens: Tensor) -> Tensor:
        config = model.config.get_text_config(decoder=True)
        cache = NestedKVCache(config, tokens.shape[1], 1, tokens.device)
        pads = torch.zeros(1, 1, dtype=torch.int64, device=tokens.device)
        columns = torch.arange(tokens.shape[1], device=tokens.device)[None]
        with nested_attention_implementation(model):
            return NestedForward(model, model, cache, pads)(view, tokens, columns)

    return logits


def dense_logits(model: PreTrainedModel) -> Logits:
    """Logits of an ordinary model."""
    return lambda tokens: model(input_ids=tokens, use_cache=False).logits


def plain_w8a8(reference: PreTrainedModel, rotation: RotationChoice, seed: int) -> PreTrainedModel:
    """A copy of the 16-bit model in plain W8A8, with the rotation of the nested model."""
    model = copy.deepcopy(reference)
    quantize_(model, w8a8(rotation=rotation, seed=seed))
    return model


def texts_to_score(tokenizer: Tokenizer, tokens: int) -> list[list[int]]:
    """Held-out token sequences to predict: code and chats, half each, ``tokens`` at most.

    Raises:
        ValueError: no sequence has two tokens, or the tokenizer has no chat template.
    """
    code: list[list[int]] = []
    left = tokens // 2
    for sequence in tokenize_texts(tokenizer, humaneval_prompts()):
        left -= len(sequence)
        if left < 0:
            break
        code.append(sequence)
    sequences = code + heldout_tokens(tokenizer, tokens - tokens // 2, 512)
    # The last text is cut to fit; of a single token nothing can be predicted.
    sequences = [sequence for sequence in sequences if len(sequence) > 1]
    if not sequences:
        raise ValueError(f"tokens={tokens}: too few to predict one from another")
    return sequences


def prompts_to_answer(tokenizer: Tokenizer, new_tokens: int) -> list[list[int]]:
    """Held-out prompts, chats and code, whose answers have about ``new_tokens`` tokens in all."""
    if not new_tokens:
        return []
    count = max(2, -(-new_tokens // NEW_TOKENS_A_PROMPT))
    code = code_prompt_tokens(tokenizer)[: count // 2]
    return chat_prompt_tokens(tokenizer, count - len(code), max_length=256) + code


@torch.no_grad()
def score_text(
    reference: PreTrainedModel,
    nested: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    w8a8_model: PreTrainedModel | None = None,
    progress: bool = True,
) -> Evaluation:
    """Perplexity and agreement of all models on the same token sequences.

    Args:
        reference: the 16-bit model; its choices are what the others are compared with.
        nested: the nested model, read in both views.
        sequences: token ids, each at least two long.
        w8a8_model: plain W8A8, to compare with.
        progress: show a progress bar.
    """
    models: dict[str, Logits] = {"16-bit": dense_logits(reference)}
    if w8a8_model is not None:
        models["plain W8A8"] = dense_logits(w8a8_model)
    models["target (W8A8, KV8)"] = nested_logits(nested, "target")
    models["draft (W4A8, KV8)"] = nested_logits(nested, "draft")
    evaluation = Evaluation([ModelScore(name) for name in models])
    total = sum(map(len, sequences))
    with tqdm(total=total, desc="text", unit="token", disable=not progress) as bar:
        for sequence in sequences:
            tokens = torch.tensor([sequence], device=reference.device)
            choices: list[Tensor] = []
            for score, logits in zip(evaluation.scores, models.values(), strict=True):
                output = logits(tokens)
                first = choices[0] if choices else output[0, :-1].argmax(-1)
                choices.append(score.add(output, tokens, first))
            evaluation.draft_target_agreements += int((choices[-1] == choices[-2]).sum())
            bar.update(len(sequence))
    return evaluation


def measure_acceptance(
    nested: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    pad_token_id: int,
    gamma: int = 4,
    kv: str | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> DecodingMetrics:
    """Metrics of greedy speculative decoding, summed over prompts.

    Prompts of about one length share a batch.
    """
    ordered = sorted(prompts, key=len)
    batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    results = []
    for batch in tqdm(batches, desc="generation", unit="batch", disable=not progress):
        width = max(map(len, batch))
        rows = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in batch]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch]
        output = speculative_generate(
            nested,
            torch.tensor(rows, device=nested.device),
            attention_mask=torch.tensor(mask, device=nested.device),
            gamma=gamma,
            kv=kv,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad_token_id,
            return_dict_in_generate=True,
        )
        assert isinstance(output, SpeculativeOutput)
        assert output.metrics is not None
        results.append(output.metrics)
    return DecodingMetrics.total(results)
