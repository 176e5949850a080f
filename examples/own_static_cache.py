"""Nest a GPT that is not from transformers: its own caches by nestq, its linears by torchao.

Run from anywhere after `pip install -e .`: python examples/own_static_cache.py
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import quantize_

from nestq import bitnest_w4w8, nest_static_cache_, nest_view

LAYERS, HEADS, KV_HEADS, HEAD_DIM, SLOTS, VOCABULARY = 4, 8, 2, 32, 256, 1000
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    """With a static cache, as small GPT implementations have one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, KV_HEADS, SLOTS, HEAD_DIM))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], -1, HEAD_DIM).transpose(1, 2)
        query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        self.keys[:, :, positions] = key
        self.values[:, :, positions] = value
        attended = F.scaled_dot_product_attention(
            query, self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        return self.out(attended.transpose(1, 2).reshape(x.shape))


class GPT(nn.Module):
    """Attention, and a gated layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        mask = torch.arange(SLOTS, device=ids.device) <= positions[:, None]
        x = self.tokens(ids)
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(self.norm(x), positions, mask)
            x = x + down(F.silu(up(self.norm(x))))
        return self.head(self.norm(x))


def cache_bytes(model: nn.Module) -> int:
    """Of keys and values."""
    return sum(b.nbytes for name, b in model.named_buffers() if "keys" in name or "values" in name)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = GPT().eval()
    prompt = torch.randint(VOCABULARY, (1, 48))
    positions = torch.arange(48)
    dense, before = model(prompt, positions), cache_bytes(model)

    with warnings.catch_warnings():  # torchao sees one linear at a time: to nearest, no rotation
        warnings.simplefilter("ignore")
        quantize_(model, bitnest_w4w8())
    # A prompt and a step, as the sizes of inputs differ in kind.
    examples = [(prompt, positions), (prompt[:, :1], positions[:1])]
    names = nest_static_cache_(model, examples, kv="kv4/kv8")
    print(
        f"{len(names)} buffers are planes now: {before} bytes of cache became {cache_bytes(model)}"
    )

    model.compile(backend="eager")  # or Inductor, which takes longer to compile
    for view in ("target", "draft"):
        with nest_view(view):
            logits = model(prompt, positions)
            step = model(logits[:, -1:].argmax(-1), positions[-1:] + 1)
        error = ((logits - dense).norm() / dense.norm()).item()
        print(f"{view}: {error:.1%} from the dense model, then token {step.argmax().item()}")


if __name__ == "__main__":
    main()
