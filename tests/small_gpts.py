"""Small GPTs as people write them, with their own static caches: three ways to update and mask."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SLOTS, HEADS, HEAD_DIM, VOCABULARY = 2, 24, 4, 16, 61


class Layer(nn.Module):
    """Attention with buffers of keys and values, and a residual stream."""

    shape = "BHSD"

    def __init__(self, kv_heads: int, scale: float | None) -> None:
        super().__init__()
        self.kv_heads, self.scale = kv_heads, scale
        width = HEADS * HEAD_DIM
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, kv_heads * HEAD_DIM)
        self.value = nn.Linear(width, kv_heads * HEAD_DIM)
        self.out = nn.Linear(width, width, bias=False)
        sizes = {"B": BATCH, "H": kv_heads, "S": SLOTS, "D": HEAD_DIM}
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros([sizes[size] for size in self.shape]))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value ``[B, n, H, D]``."""
        made = (linear(x) for linear in (self.query, self.key, self.value))
        query, key, value = (states.view(*x.shape[:2], -1, HEAD_DIM) for states in made)
        return query, key, value

    def stored(self, states: Tensor) -> Tensor:
        """What a test may change of new keys and values."""
        return states

    def joined(self, attended: Tensor) -> Tensor:
        """Heads ``[B, H, n, D]`` back in the residual stream."""
        return self.out(attended.transpose(1, 2).reshape(attended.shape[0], -1, HEADS * HEAD_DIM))


class GPT(nn.Module):
    """Embedding, layers and a head; what a forward pass takes is up to the kinds."""

    kind = Layer

    def __init__(self, layers: int = 1, kv_heads: int = 2, scale: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.layers = nn.ModuleList(self.kind(kv_heads, scale) for _ in range(layers))
        self.head = nn.Linear(HEADS * HEAD_DIM, VOCABULARY, bias=False)
        self.eval()

    def through(self, ids: Tensor, *rest: Any) -> Tensor:
        """Logits ``[B, n, V]``."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, *rest)
        return self.head(x)


class IndexCopyLayer(Layer):
    """``index_copy_``, repeated heads, rotary embedding."""

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Any:
        query, key, value = (states.transpose(1, 2) for states in self.heads(x))
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        self.keys.index_copy_(2, positions, self.stored(key))
        self.values.index_copy_(2, positions, self.stored(value))
        repeats = HEADS // self.kv_heads
        keys = self.keys.repeat_interleave(repeats, dim=1)
        values = self.values.repeat_interleave(repeats, dim=1)
        return self.joined(self.attend(query, keys, values, mask))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """What a test may change of attention."""
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=self.scale)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[B, H, n, D]``."""
    first, second = states.chunk(2, dim=-1)
    return states * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


class IndexCopyGPT(GPT):
    """A mask of slots up to each position."""

    kind = IndexCopyLayer

    def forward(self, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        mask = self.mask(ids, positions)
        half = torch.arange(HEAD_DIM // 2, device=ids.device) / HEAD_DIM
        angles = (positions[:, None] * 100.0**-half).repeat(1, 2)[None].to(self.head.weight.dtype)
        return {"logits": self.through(ids, positions, mask, angles.cos(), angles.sin())}

    def mask(self, ids: Tensor, positions: Tensor) -> Tensor:
        """What a test may change of the mask."""
        return torch.arange(SLOTS, device=ids.device)[None, :] <= positions[:, None]


class SliceLayer(Layer):
    """Slices of buffers ``[B, S, H, D]``, expanded heads."""

    shape = "BSHD"

    def forward(self, x: Tensor, start: int, mask: Tensor | None) -> Tensor:
        query, key, value = self.heads(x)
        batch, count = x.shape[:2]
        stop = start + count
        self.keys[:batch, start:stop] = self.stored(key)
        self.values[:batch, start:stop] = self.stored(value)
        keys, values = (self.repeated(cache[:batch, :stop]) for cache in (self.keys, self.values))
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=mask, scale=self.scale
        )
        return self.joined(attended)

    def repeated(self, states: Tensor) -> Tensor:
        """``[B, H, n, D]``, each head once for every query head."""
        repeats = HEADS // self.kv_heads
        wide = states[:, :, :, None].expand(-1, -1, -1, repeats, -1)
        return wide.reshape(*states.shape[:2], HEADS, HEAD_DIM).transpose(1, 2)


class SliceGPT(GPT):
    """Positions from a start on, and a mask of 0 and -inf, but for single tokens."""

    kind = SliceLayer

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        mask = None
        count = ids.shape[1]
        if count > 1:
            dtype = self.head.weight.dtype
            square = torch.full((count, count), float("-inf"), dtype=dtype).triu(1)
            mask = torch.hstack([torch.zeros(count, start, dtype=dtype), square])
        return self.through(ids, start, mask)


class IndexPutLayer(Layer):
    """``cache[:, :, positions] = states``, heads shared by SDPA."""

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (states.transpose(1, 2) for states in self.heads(x))
        self.put(self.keys, positions, self.stored(key))
        self.put(self.values, positions, self.stored(value))
        options = {"enable_gqa": True} if self.kv_heads < HEADS else {}
        attended = F.scaled_dot_product_attention(
            query, self.keys, self.values, mask, scale=self.scale, **options
        )
        return self.joined(attended)

    def put(self, cache: Tensor, positions: Tensor, states: Tensor) -> None:
        """What other kinds spell in another way."""
        cache[:, :, positions] = states


class IndexPutGPT(GPT):
    """A mask that is rows of a triangle in a buffer."""

    kind = IndexPutLayer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("triangle", torch.ones(SLOTS, SLOTS, dtype=torch.bool).tril())

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.through(ids, positions, self.triangle[None, None, positions])


class ExplicitPutLayer(IndexPutLayer):
    """``index_put_`` with an index for rows and heads, too."""

    def put(self, cache: Tensor, positions: Tensor, states: Tensor) -> None:
        batch, heads = (torch.arange(size) for size in cache.shape[:2])
        index = batch[:, None, None], heads[None, :, None], positions[None, None, :]
        cache.index_put_(index, states)


class ExplicitPutGPT(IndexPutGPT):
    """The same with ``index_put_``."""

    kind = ExplicitPutLayer


GPTS: dict[str, type[GPT]] = {
    "index_copy_": IndexCopyGPT,
    "slice": SliceGPT,
    "index": IndexPutGPT,
    "index_put_": ExplicitPutGPT,
}


def build(name: str, seed: int = 0, **options: Any) -> GPT:
    """A random one; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPTS[name](**options)


def call(model: nn.Module, start: int, count: int, seed: int = 0) -> tuple[Any, ...]:
    """Arguments for ``count`` tokens from a position on."""
    generator = torch.Generator().manual_seed(seed + start)
    ids = torch.randint(VOCABULARY, (BATCH, count), generator=generator)
    if isinstance(model, SliceGPT):
        return ids, start
    return ids, torch.arange(start, start + count)


def logits(output: Any) -> Tensor:
    """Of any kind."""
    return output["logits"] if isinstance(output, dict) else output
