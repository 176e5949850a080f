"""Rotations of a model's channels that leave the function it computes unchanged.

R1 rotates the residual stream, R2 the values of every head (BitNest paper section 3.2; R1 and R2
of SpinQuant). Both spread outliers over channels, and both are folded into the weights offline,
so they add nothing to the forward pass.

With activations as rows, `x' = x R1` and `v' = v R2`, the weights `W [out, in]` become

    embedding                       E R1
    reads the residual stream       W diag(norm weight) R1     (the norm weight becomes one)
    writes the residual stream      R1^T W and bias R1
    values, rows of each head       R2^T W and bias R2
    reads the heads' outputs        W R2 in the columns of each head

The norm weight has to leave its norm because dividing by the RMS commutes with a rotation and a
factor per channel does not. One R2 serves all heads of a layer, so query heads that share a value
head need no care.

Arithmetic is in float64 and each weight is cast once.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from nestq.architectures import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Architecture,
    UnsupportedArchitectureError,
    describe,
)
from nestq.orthogonal import hadamard, random_orthogonal

RotationKind = Literal["orthogonal", "hadamard"]

# A QR factor of size 8192 is orthogonal to 1e-13 or so; a float32 matrix is off by 1e-7.
ORTHOGONALITY_TOLERANCE = 1e-10
# Narrower formats need scales of their own, which a rotation would have to choose anew.
ROTATABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Rows of embedding and head that are in float64 at a time: 128 MiB at 4096 channels.
ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotations of one model. Orthogonality is checked once, here.

    Attributes:
        r1: `[hidden_size, hidden_size]`, float64, rotates the residual stream; None leaves it, and
            the norms, as they are.
        r2: one `[head_dim, head_dim]`, float64, for every decoder layer, rotates the values of all
            its heads; None leaves them as they are.

    Raises:
        TypeError: a matrix is not a float64 tensor.
        ValueError: a matrix is not square, or not orthogonal to `ORTHOGONALITY_TOLERANCE`.
    """

    r1: Tensor | None
    r2: tuple[Tensor, ...] | None

    def __post_init__(self) -> None:
        if self.r1 is not None:
            _check_orthogonal("r1", self.r1)
        for index, matrix in enumerate(self.r2 or ()):
            _check_orthogonal(f"r2[{index}]", matrix)

    @classmethod
    def random(
        cls,
        architecture: Architecture,
        seed: int,
        kind: RotationKind = "orthogonal",
        *,
        r1: bool = True,
        r2: bool = True,
    ) -> "Rotation":
        """Draw the rotations for a model on the CPU.

        Args:
            architecture: gives the sizes.
            seed: the same seed gives the same rotations.
            kind: `"orthogonal"`, or `"hadamard"` with random signs, which spreads an outlier
                evenly and exists for some sizes only.
            r1: whether to rotate the residual stream.
            r2: whether to rotate the values.

        Raises:
            ValueError: `kind` is unknown, or has no matrix of a size that is needed.
            UnsupportedArchitectureError: `r1` is wanted and the model cannot take it.
        """
        if kind not in get_args(RotationKind):
            raise ValueError(f"kind: expected one of {get_args(RotationKind)}, got {kind!r}")
        if r1:
            _check_residual_rotatable(architecture)
        draw = hadamard if kind == "hadamard" else random_orthogonal
        generator = torch.Generator().manual_seed(seed)
        residual = draw(architecture.hidden_size, generator) if r1 else None
        values = None
        if r2:
            values = tuple(draw(architecture.head_dim, generator) for _ in architecture.layers)
        return cls(r1=residual, r2=values)


def rotate_(model: nn.Module, rotation: Rotation) -> None:
    """Rotate a whole model in place; it computes the same function as before.

    With an `r1`, embedding and head are untied first, because the head takes up the weight of the
    final norm and the embedding does not. What is refused is left unchanged.

    Raises:
        UnsupportedArchitectureError: see `describe`, or the residual stream of this model cannot
            be rotated.
        TypeError: a weight is no plain parameter in one of `ROTATABLE_DTYPES`.
        ValueError: a rotation has the wrong size; a weight is on the meta device, is not finite,
            or is shared (embedding and head may share one).
    """
    architecture = describe(model)
    _check(architecture, rotation)
    if rotation.r1 is not None:
        untie_(model)
        _rotate_embedding_(architecture, rotation.r1)
        _rotate_head_(architecture, rotation.r1)
    for index in range(len(architecture.layers)):
        _rotate_layer_(architecture, index, rotation)


def _check(architecture: Architecture, rotation: Rotation) -> None:
    """Everything that `rotate_` asks for."""
    _check_fits(architecture, rotation)
    parameters = _parameters(EMBEDDING, architecture.embedding)
    for index in range(len(architecture.layers)):
        parameters |= _layer_parameters(architecture, index)
    parameters |= _parameters(FINAL_NORM, architecture.final_norm)
    parameters |= _parameters(HEAD, architecture.head)
    _check_parameters(parameters)

    if architecture.tied:
        del parameters[f"{HEAD}.weight"]
    owners: dict[tuple[torch.device, int], str] = {}
    for name, parameter in parameters.items():
        owner = owners.setdefault((parameter.device, parameter.data_ptr()), name)
        if owner != name:
            raise ValueError(f"model: {owner} and {name} share memory and would rotate twice")


@torch.no_grad()
def _rotate_embedding_(architecture: Architecture, r1: Tensor) -> None:
    for rows in torch.split(architecture.embedding.weight, ROWS_AT_A_TIME):
        rows.copy_(_rotated(rows, read=r1))


@torch.no_grad()
def _rotate_layer_(architecture: Architecture, index: int, rotation: Rotation) -> None:
    family = architecture.family
    r1 = rotation.r1
    r2 = None if rotation.r2 is None else rotation.r2[index]
    attention_norm = _weight(architecture.norm(index, family.attention_norm))
    mlp_norm = _weight(architecture.norm(index, family.mlp_norm))
    attention_scale = None if r1 is None else attention_norm
    mlp_scale = None if r1 is None else mlp_norm

    for name in family.attention_inputs:
        _fold_(
            architecture.linear(index, name),
            scale=attention_scale,
            read=r1,
            write=r2 if name == architecture.value_linear else None,
            write_rows=architecture.value_rows,
        )
    _fold_(architecture.linear(index, family.attention_output), read=r2, write=r1)
    for name in family.mlp_inputs:
        _fold_(architecture.linear(index, name), scale=mlp_scale, read=r1)
    _fold_(architecture.linear(index, family.mlp_output), write=r1)
    if r1 is not None:
        attention_norm.fill_(1.0)
        mlp_norm.fill_(1.0)


@torch.no_grad()
def _rotate_head_(architecture: Architecture, r1: Tensor) -> None:
    norm = _weight(architecture.final_norm)
    for rows in torch.split(architecture.head.weight, ROWS_AT_A_TIME):
        rows.copy_(_rotated(rows, scale=norm, read=r1))
    norm.fill_(1.0)


def untie_(model: nn.Module) -> None:
    """Give the head a weight of its own, and see to it that nothing ties it again.

    The config says `tie_word_embeddings=False` afterwards, so `tie_weights`, `save_pretrained`
    and `from_pretrained` of transformers keep two weights.

    Raises:
        TypeError, UnsupportedArchitectureError: see `describe`.
    """
    architecture = describe(model)
    if architecture.tied:
        shared = architecture.embedding.weight
        architecture.head.weight = nn.Parameter(
            shared.detach().clone(), requires_grad=shared.requires_grad
        )
    config: Any = architecture.model.config
    config.tie_word_embeddings = False
    # transformers works this mapping out once, when it builds the model.
    tied_keys = getattr(architecture.model, "all_tied_weights_keys", {})
    for target, source in list(tied_keys.items()):
        if f"{HEAD}.weight" in (target, source):
            del tied_keys[target]


def _rotated(
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    read: Tensor | None = None,
    write: Tensor | None = None,
    write_rows: slice = slice(None),
) -> Tensor:
    """A rotated copy `[out, in]` of a weight, float64.

    A matrix smaller than the dimension it rotates is applied to every block of its size.

    Args:
        weight: `[out, in]`.
        scale: `[in]`, the weight of the norm in front, multiplies the input channels first.
        read: `[size, size]`, rotates input channels.
        write: `[size, size]`, rotates output channels.
        write_rows: the output channels that `write` rotates.
    """
    result = weight.to(torch.float64, copy=True)
    if scale is not None:
        result *= scale.to(result)
    if read is not None:
        blocks = torch.unflatten(result, 1, (-1, read.shape[0]))
        result = (blocks @ read.to(result)).flatten(1)
    if write is not None:
        blocks = torch.unflatten(result[write_rows], 0, (-1, write.shape[0]))
        result[write_rows] = (write.to(result).T @ blocks).flatten(0, 1)
    return result


def _weight(norm: nn.Module) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, Tensor)  # `_check_parameters` has checked more
    return weight


def _fold_(
    linear: nn.Linear,
    *,
    scale: Tensor | None = None,
    read: Tensor | None = None,
    write: Tensor | None = None,
    write_rows: slice = slice(None),
) -> None:
    """Put the rotated weight and bias in place; arguments as of `_rotated`."""
    linear.weight.copy_(
        _rotated(linear.weight, scale=scale, read=read, write=write, write_rows=write_rows)
    )
    if linear.bias is not None:
        column = linear.bias.unsqueeze(1)
        column.copy_(_rotated(column, write=write, write_rows=write_rows))


def _layer_parameters(architecture: Architecture, index: int) -> dict[str, Tensor]:
    """Only what a rotation touches."""
    family = architecture.family
    found: dict[str, Tensor] = {}
    for name in (*architecture.linear_names, family.attention_norm, family.mlp_norm):
        module = architecture.layers[index].get_submodule(name)
        found |= _parameters(f"{architecture.layer_name(index)}.{name}", module)
    return found


def _parameters(name: str, module: nn.Module) -> dict[str, Tensor]:
    # By attribute: a weight that is computed on access (a parametrization) is no registered
    # parameter, and writing to it would be lost.
    found = {f"{name}.{key}": getattr(module, key, None) for key in ("weight", "bias")}
    return {key: value for key, value in found.items() if value is not None}


def _check_orthogonal(name: str, matrix: Tensor) -> None:
    if not isinstance(matrix, Tensor) or matrix.dtype != torch.float64:
        got = getattr(matrix, "dtype", type(matrix).__name__)
        raise TypeError(f"{name}: expected a torch.float64 tensor, got {got}")
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name}: expected a square matrix, got shape {tuple(matrix.shape)}")
    identity = torch.eye(matrix.shape[0], dtype=torch.float64, device=matrix.device)
    error = (matrix.T @ matrix - identity).abs().max().item()
    if not error <= ORTHOGONALITY_TOLERANCE:  # so that NaN fails, too
        raise ValueError(
            f"{name}: expected an orthogonal matrix, but R^T R differs from the identity by "
            f"{error:.1e}, more than {ORTHOGONALITY_TOLERANCE:.0e}"
        )


def _check_residual_rotatable(architecture: Architecture) -> None:
    if not architecture.rotatable:
        raise UnsupportedArchitectureError(
            f"r1: the residual stream of {type(architecture.model).__name__} cannot be rotated "
            f"exactly: {architecture.reason}. R2 alone can be applied (r1=False)."
        )


def _check_fits(architecture: Architecture, rotation: Rotation) -> None:
    if rotation.r1 is not None:
        _check_residual_rotatable(architecture)
        _check_width("r1", rotation.r1, "hidden_size", architecture.hidden_size)
    if rotation.r2 is not None:
        if len(rotation.r2) != len(architecture.layers):
            raise ValueError(
                f"r2: expected one matrix for each of {len(architecture.layers)} decoder layers, "
                f"got {len(rotation.r2)}"
            )
        for index, matrix in enumerate(rotation.r2):
            _check_width(f"r2[{index}]", matrix, "head_dim", architecture.head_dim)


def _check_width(name: str, matrix: Tensor, what: str, expected: int) -> None:
    if matrix.shape[0] != expected:
        raise ValueError(
            f"{name}: expected the {what} of the model, {expected}, got shape {tuple(matrix.shape)}"
        )


def _check_parameters(parameters: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter or parameter.dtype not in ROTATABLE_DTYPES:
            raise TypeError(
                f"{name}: expected a plain parameter in one of {ROTATABLE_DTYPES}, got "
                f"{type(parameter).__name__} of {parameter.dtype}"
            )
        if parameter.is_meta:
            raise ValueError(f"{name}: is on the meta device; load the weights before rotating")
        if not parameter.isfinite().all():
            raise ValueError(f"{name}: contains NaN or infinity")
