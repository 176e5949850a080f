"""Tune the base end to end: make the draft's logits those of the 16-bit model.

GPTQ makes each layer's outputs right. What acceptance needs is that the last layer's are: with the
rest of the model fixed, the scales of the base, and its codes if asked for, are trained on the KL
divergence between the 16-bit model and the draft, with INT8 activations, before the refinement is
made.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from nestq.architectures import HEAD, Architecture
from nestq.calibration import moved, replaced_forward
from nestq.nesting import NestedCodes
from nestq.recipes import NestedRecipe
from nestq.reference import weights as reference
from nestq.reference.linear import quantize_activation

# Change in one step of Adam: of the logarithm of a scale, and of a code before it is rounded.
SCALE_LEARNING_RATE = 3e-3
CODE_LEARNING_RATE = 1e-2
WARMUP_STEPS = 20
# Tokens whose gradients are averaged in a step.
TOKENS_PER_STEP = 16384
# Base steps by which a tuned code may leave the weight it stands for, before it is rounded: the
# refinement reaches 8 / overlap base steps, and rounding takes half of one.
CODE_REACH = 0.6


class _RoundThrough(torch.autograd.Function):
    """A rounding whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _TunedLinear:
    """Forward pass of a linear in the draft view, differentiable in its scales and codes.

    Attributes:
        log_factor: ``[N, G]``, natural logarithm of what multiplies the scale.
        latent: ``[N, K]``, codes before they are rounded; a parameter if codes are tuned.
    """

    def __init__(
        self, linear: nn.Linear, codes: NestedCodes, recipe: NestedRecipe, device: torch.device
    ) -> None:
        self.linear = linear
        self.scale = codes.scale.to(device)
        self.group_size = recipe.group_size
        self.log_factor = nn.Parameter(torch.zeros_like(self.scale, dtype=torch.float32))
        # It starts in the middle of a code: only a gradient that persists moves it to another.
        self.latent = codes.base.to(device)
        if recipe.tune_codes:
            self.latent = nn.Parameter(self.latent.float())

    def tuned_scale(self) -> Tensor:
        """Float32 scale ``[N, G]``, rounded to the dtype in which it will be stored."""
        exact = self.scale.float() * self.log_factor.exp()
        return _RoundThrough.apply(exact, exact.detach().to(self.scale.dtype).float())

    def tuned_base(self) -> Tensor:
        """Codes ``[N, K]``."""
        if not self.latent.is_floating_point():
            return self.latent
        low, high = reference.code_range(4)
        return _RoundThrough.apply(self.latent, self.latent.detach().round().clamp(low, high))

    def expanded_scale(self) -> Tensor:
        """``tuned_scale`` of every weight, ``[N, K]``."""
        scale = reference.expand_scale(self.tuned_scale(), self.group_size)
        return scale[:, : self.latent.shape[1]]

    @torch.no_grad()
    def keep_within_reach(self) -> None:
        """Keep tuned codes where the refinement can still reach the weight."""
        if self.latent.is_floating_point():
            ideal = reference.divide_by_scale(self.linear.weight.float(), self.expanded_scale())
            self.latent.clamp_(ideal - CODE_REACH, ideal + CODE_REACH)

    def __call__(self, x: Tensor) -> Tensor:
        codes, activation_scale = quantize_activation(x.detach())
        x = _RoundThrough.apply(x, (codes * activation_scale).to(x.dtype))
        weight = self.tuned_base() * self.expanded_scale()
        return F.linear(x, weight.to(x.dtype), self.linear.bias)


def tune_base(
    architecture: Architecture,
    codes: Mapping[str, NestedCodes],
    windows: Tensor,
    recipe: NestedRecipe,
    device: torch.device,
    batch_size: int = 1,
    progress: bool = True,
) -> list[float]:
    """Tune all bases in place.

    Args:
        architecture: of the rotated model; its dense weights are the teacher.
        codes: codes by name of the linear; their ``scale``, and ``base`` if codes are tuned, are
            replaced.
        windows: token ids ``[n, length]``, used again from the start when they run out.
        recipe: says how many steps, and seeds the order of the rows.
        device: where the whole model is while it is tuned.
        batch_size: rows that pass through the model at once.
        progress: show a progress bar.

    Returns:
        KL divergence of each step, nats a token.
    """
    model = architecture.model
    with torch.enable_grad(), moved(model, device), _frozen(model):
        return _tune(architecture, codes, windows, recipe, device, batch_size, progress)


def _tune(
    architecture: Architecture,
    codes: Mapping[str, NestedCodes],
    windows: Tensor,
    recipe: NestedRecipe,
    device: torch.device,
    batch_size: int,
    progress: bool,
) -> list[float]:
    model = architecture.model
    linears = dict(architecture.named_linears()) | {HEAD: architecture.head}
    tuned = {
        name: _TunedLinear(linears[name], entry, recipe, device) for name, entry in codes.items()
    }
    groups: list[dict[str, Any]] = [
        {"params": [entry.log_factor for entry in tuned.values()], "peak": SCALE_LEARNING_RATE}
    ]
    if recipe.tune_codes:
        latents = [entry.latent for entry in tuned.values()]
        groups.append({"params": latents, "peak": CODE_LEARNING_RATE})
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))
    batches_per_step = max(1, TOKENS_PER_STEP // (windows.shape[1] * batch_size))
    batches = _shuffled_batches(windows, batch_size, recipe.seed)
    losses = []
    steps = tqdm(range(recipe.tuning_steps), desc="tuning", unit="step", disable=not progress)
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * _schedule(step, recipe.tuning_steps)
        loss = 0.0
        for _ in range(batches_per_step):
            divergence = _divergence(model, tuned, next(batches).to(device)) / batches_per_step
            divergence.backward()  # type: ignore[no-untyped-call]
            loss += divergence.item()
        optimizer.step()
        optimizer.zero_grad()
        for entry in tuned.values():
            entry.keep_within_reach()
        losses.append(loss)
        steps.set_postfix(kl=f"{loss:.4f}")
    for name, nested in codes.items():
        scale = tuned[name].tuned_scale().detach()
        nested.scale = reference.round_scale(scale, nested.scale.dtype).to(nested.scale)
        nested.base = tuned[name].tuned_base().detach().to(nested.base)
    return losses


def _divergence(model: nn.Module, tuned: Mapping[str, _TunedLinear], tokens: Tensor) -> Tensor:
    """Mean KL divergence of the draft from the 16-bit model over tokens ``[rows, length]``."""
    batch = {"input_ids": tokens, "use_cache": False}
    # Float32 weights need no float32 products here: gradients are noisier than bfloat16.
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        with torch.no_grad():
            teacher = model(**batch).logits.float().log_softmax(-1)
        with _drafting(tuned):
            draft = model(**batch).logits.float().log_softmax(-1)
    return F.kl_div(
        draft.flatten(0, 1), teacher.flatten(0, 1), log_target=True, reduction="batchmean"
    )


@contextmanager
def _drafting(tuned: Mapping[str, _TunedLinear]) -> Iterator[None]:
    """Let the linears compute as tuned drafts for a while."""
    with ExitStack() as stack:
        for entry in tuned.values():
            stack.enter_context(replaced_forward(entry.linear, entry))
        yield


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Let no parameter of a model gather a gradient for a while."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _shuffled_batches(windows: Tensor, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Batches of rows in random order, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(windows), generator=generator)
        for rows in order.split(batch_size):
            yield windows[rows]


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to 3%."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * (0.03 + 0.97 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))
