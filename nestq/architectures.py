"""Where the parts of a Hugging Face causal language model lie.

This file alone knows module names. Everything else asks `describe` and works with the
`Architecture` that it returns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

EMBEDDING = "model.embed_tokens"
LAYERS = "model.layers"
FINAL_NORM = "model.norm"
HEAD = "lm_head"

ModuleT = TypeVar("ModuleT", bound=nn.Module)
SublayerKind = Literal["attention", "mlp"]


class UnsupportedArchitectureError(ValueError):
    """The model, or what was asked of it, does not fit what nestq knows of its structure."""


@dataclass(frozen=True)
class Family:
    """Module names inside one decoder layer, relative to the layer.

    The layer computes `h = x + attention(attention_norm(x))`, then `h + mlp(mlp_norm(h))`. A family
    that has norms behind these sublayers, too, adds what they make of the outputs.

    Attributes:
        attention_inputs: linears that read the output of `attention_norm`. The value rows are the
            last rows of the last of them.
        attention_output: linear that reads the concatenated heads and writes the residual stream.
        mlp_inputs: linears that read the output of `mlp_norm`.
        mlp_output: linear that writes the residual stream.
        attention_norm: norm in front of `attention_inputs`; it multiplies by its weight.
        mlp_norm: norm in front of `mlp_inputs`; it multiplies by its weight.
        attention_post_norm: norm behind attention; None if there is none.
        mlp_post_norm: norm behind the MLP; None if there is none.
        residual_obstacle: why the residual stream cannot be rotated exactly; None if it can.
    """

    attention_inputs: tuple[str, ...]
    attention_output: str
    mlp_inputs: tuple[str, ...]
    mlp_output: str
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None
    residual_obstacle: str | None = None

    @property
    def norms(self) -> dict[SublayerKind, tuple[str, ...]]:
        """Names of the norms in front of a sublayer and behind it."""
        attention = self.attention_norm, self.attention_post_norm
        mlp = self.mlp_norm, self.mlp_post_norm
        return {
            "attention": tuple(name for name in attention if name is not None),
            "mlp": tuple(name for name in mlp if name is not None),
        }


_LLAMA = Family(
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
)
_PHI3 = Family(
    attention_inputs=("self_attn.qkv_proj",),
    attention_output="self_attn.o_proj",
    mlp_inputs=("mlp.gate_up_proj",),
    mlp_output="mlp.down_proj",
)
_GEMMA2 = Family(
    attention_inputs=_LLAMA.attention_inputs,
    attention_output=_LLAMA.attention_output,
    mlp_inputs=_LLAMA.mlp_inputs,
    mlp_output=_LLAMA.mlp_output,
    mlp_norm="pre_feedforward_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    residual_obstacle=(
        "its norms after attention and after the MLP scale single channels of what is added to "
        "the residual stream, and that does not commute with a rotation of the channels"
    ),
)

# `config.model_type` -> names. Qwen2.5 has the model_type of Qwen2. Qwen3's q_norm and k_norm act
# on single heads behind q_proj and k_proj, where no rotation reaches.
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": _PHI3,
    "gemma2": _GEMMA2,
}


@dataclass(frozen=True, eq=False)
class Architecture:
    """The parts of one model. The modules are the model's own, not copies.

    Attributes:
        model: the causal language model, without a `torch.compile` wrapper.
        family: names inside a decoder layer.
        embedding: weight `[vocab, hidden_size]`.
        layers: decoder layers, first to last.
        final_norm: norm in front of the head; it multiplies by its weight.
        head: weight `[vocab, hidden_size]`.
        num_heads: query heads a layer.
        num_kv_heads: key and value heads a layer; `num_heads / num_kv_heads` query heads share one.
        head_dim: channels a head.
        hidden_size: channels of the residual stream.
    """

    model: nn.Module
    family: Family
    embedding: nn.Embedding
    layers: nn.ModuleList
    final_norm: nn.Module
    head: nn.Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one parameter now."""
        return self.embedding.weight is self.head.weight

    @property
    def rotatable(self) -> bool:
        """Whether the residual stream can be rotated exactly (R1). R2 is exact in every family."""
        return self.family.residual_obstacle is None

    @property
    def reason(self) -> str | None:
        """Why the residual stream cannot be rotated; None if it can."""
        return self.family.residual_obstacle

    @property
    def linear_groups(self) -> tuple[tuple[str, ...], ...]:
        """Linears of a decoder layer in order of evaluation; those of one tuple read one input."""
        family = self.family
        return (
            family.attention_inputs,
            (family.attention_output,),
            family.mlp_inputs,
            (family.mlp_output,),
        )

    @property
    def linear_names(self) -> tuple[str, ...]:
        """All linears of a decoder layer in order of evaluation, relative to the layer."""
        return tuple(name for group in self.linear_groups for name in group)

    @property
    def value_linear(self) -> str:
        """The linear that computes the values, relative to the layer: v_proj, or a fused one."""
        return self.family.attention_inputs[-1]

    @property
    def value_rows(self) -> slice:
        """Rows of `value_linear` that compute the values: `num_kv_heads * head_dim` of them."""
        return slice(-self.num_kv_heads * self.head_dim, None)

    def layer_name(self, index: int) -> str:
        """Name of decoder layer `index` in the model."""
        return f"{LAYERS}.{index}"

    def linear(self, index: int, name: str) -> nn.Linear:
        """The linear `name` (relative to the layer) of decoder layer `index`."""
        return _get(self.layers[index], name, nn.Linear)

    def norm(self, index: int, name: str) -> nn.Module:
        """The norm `name` (relative to the layer) of decoder layer `index`."""
        return self.layers[index].get_submodule(name)

    def sublayer(self, index: int, kind: SublayerKind) -> nn.Module:
        """The attention or the MLP of decoder layer `index`, without its norms."""
        family = self.family
        linear = family.attention_output if kind == "attention" else family.mlp_output
        return self.layers[index].get_submodule(linear.rpartition(".")[0])

    def sublayer_norms(self, index: int, kind: SublayerKind) -> list[nn.Module]:
        """The norms in front of a sublayer of decoder layer `index` and behind it."""
        return [self.norm(index, name) for name in self.family.norms[kind]]

    def named_linears(self) -> Iterator[tuple[str, nn.Linear]]:
        """Every linear of every decoder layer with its name in the model; the head is not one."""
        for index in range(len(self.layers)):
            for name in self.linear_names:
                yield f"{self.layer_name(index)}.{name}", self.linear(index, name)


def unwrap(model: Any) -> Any:
    """The module that `torch.compile` wrapped; what is not wrapped comes back as it is."""
    return getattr(model, "_orig_mod", model)


def describe(model: nn.Module) -> Architecture:
    """Find the parts of a causal language model.

    Args:
        model: a Hugging Face causal language model whose `config.model_type` is in `FAMILIES`,
            or what `torch.compile` made of one. On any device, the meta device too.

    Raises:
        TypeError: `model` is no module.
        UnsupportedArchitectureError: the model's type is unknown, modules are missing or of
            another kind, or their sizes disagree with the config. The message names them all.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    model = unwrap(model)
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if config is None or model_type not in FAMILIES:
        raise _unsupported(
            model,
            [f"config.model_type is {model_type!r}, known are {', '.join(sorted(FAMILIES))}"],
        )
    family = FAMILIES[model_type]
    problems = _structure_problems(model, family)
    if problems:
        raise _unsupported(model, problems)

    num_heads = config.num_attention_heads
    architecture = Architecture(
        model=model,
        family=family,
        embedding=_get(model, EMBEDDING, nn.Embedding),
        layers=_get(model, LAYERS, nn.ModuleList),
        final_norm=_get(model, FINAL_NORM, nn.Module),
        head=_get(model, HEAD, nn.Linear),
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        hidden_size=config.hidden_size,
    )
    problems = _size_problems(architecture)
    if problems:
        raise _unsupported(model, problems)
    return architecture


def _get(root: nn.Module, name: str, kind: type[ModuleT]) -> ModuleT:
    """The module `name` in `root`, which `_structure_problems` has found to be a `kind`."""
    module = root.get_submodule(name)
    assert isinstance(module, kind)
    return module


def _unsupported(model: nn.Module, problems: list[str]) -> UnsupportedArchitectureError:
    return UnsupportedArchitectureError(
        f"model: the structure of {type(model).__name__} is not known: {'; '.join(problems)}. "
        'With rotation="none" a model is quantized linear by linear, without this knowledge.'
    )


def _structure_problems(model: nn.Module, family: Family) -> list[str]:
    """What is missing or of another kind; of the layers only the first faulty one is reported."""
    problems = _module_problems(
        model,
        "",
        {EMBEDDING: nn.Embedding, LAYERS: nn.ModuleList, FINAL_NORM: nn.Module, HEAD: nn.Linear},
    )
    if problems:
        return problems
    linears = (
        *family.attention_inputs,
        family.attention_output,
        *family.mlp_inputs,
        family.mlp_output,
    )
    in_layer: dict[str, type[nn.Module]] = dict.fromkeys(linears, nn.Linear)
    for norms in family.norms.values():
        in_layer |= dict.fromkeys(norms, nn.Module)
    for index, layer in enumerate(model.get_submodule(LAYERS).children()):
        problems = _module_problems(layer, f"{LAYERS}.{index}.", in_layer)
        if problems:
            return problems
    return []


def _module_problems(
    root: nn.Module, prefix: str, expected: dict[str, type[nn.Module]]
) -> list[str]:
    problems = []
    for name, kind in expected.items():
        try:
            module = root.get_submodule(name)
        except AttributeError:
            problems.append(f"{prefix}{name} is missing")
            continue
        if not isinstance(module, kind):
            problems.append(
                f"{prefix}{name} is a {type(module).__name__}, expected nn.{kind.__name__}"
            )
    return problems


def _size_problems(architecture: Architecture) -> list[str]:
    """Sizes that disagree with the config; of the layers only the first faulty one is reported."""
    family = architecture.family
    hidden = architecture.hidden_size
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    if heads % kv_heads:
        return [f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"]
    problems = _mismatches(
        {
            f"width of {EMBEDDING}": (architecture.embedding.embedding_dim, hidden),
            f"in_features of {HEAD}": (architecture.head.in_features, hidden),
        }
    )
    for index in range(len(architecture.layers)):
        if problems:
            break
        prefix = architecture.layer_name(index)
        attention_inputs = [architecture.linear(index, n) for n in family.attention_inputs]
        attention_output = architecture.linear(index, family.attention_output)
        mlp_output = architecture.linear(index, family.mlp_output)
        sizes = {
            f"rows of {', '.join(family.attention_inputs)} in {prefix} together": (
                sum(linear.out_features for linear in attention_inputs),
                (heads + 2 * kv_heads) * architecture.head_dim,
            ),
            f"in_features of {prefix}.{family.attention_output}": (
                attention_output.in_features,
                heads * architecture.head_dim,
            ),
            f"out_features of {prefix}.{family.attention_output}": (
                attention_output.out_features,
                hidden,
            ),
            f"out_features of {prefix}.{family.mlp_output}": (mlp_output.out_features, hidden),
        }
        for name in (*family.attention_inputs, *family.mlp_inputs):
            linear = architecture.linear(index, name)
            sizes[f"in_features of {prefix}.{name}"] = (linear.in_features, hidden)
        problems = _mismatches(sizes)
    return problems


def _mismatches(sizes: dict[str, tuple[int, int]]) -> list[str]:
    return [
        f"{what} is {got}, the config says {expected}"
        for what, (got, expected) in sizes.items()
        if got != expected
    ]
