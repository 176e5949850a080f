"""What quantization did to each linear."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class LinearReport:
    """One nested linear.

    Attributes:
        name: qualified name in the model.
        shape: ``(N, K)``.
        draft_error: relative error of the linear's output on calibration inputs, draft view:
            ``||X (W_draft - W)^T|| / ||X W^T||``; without calibration X is the identity.
        target_error: the same for the target view.
        saturation: fraction of refinement codes that were clipped.
        damping: fraction of the mean diagonal that GPTQ added to the Hessian; None without GPTQ.
        dead_columns: inputs that were zero in the whole calibration.
    """

    name: str
    shape: tuple[int, int]
    draft_error: float
    target_error: float
    saturation: float
    damping: float | None
    dead_columns: int


@dataclass(frozen=True)
class QuantizationReport:
    """Per-linear results and how they were made.

    Attributes:
        linears: one entry for each nested linear, in order of evaluation.
        calibration_tokens: tokens that were given, in whole rows; 0 for round to nearest.
        hessian_tokens: how many of them GPTQ's Hessians are made from.
        seconds: wall time by stage.
        notes: what a user should know, such as why R1 was left out.
        tuning_loss: KL divergence (nats a token) of the draft from the 16-bit model, a value
            for each tuning step.
    """

    linears: Sequence[LinearReport]
    calibration_tokens: int
    hessian_tokens: int
    seconds: dict[str, float]
    notes: Sequence[str] = ()
    tuning_loss: Sequence[float] = field(default=(), repr=False)

    @property
    def saturation(self) -> float:
        """Fraction of clipped refinement codes over all linears."""
        weights = sum(entry.shape[0] * entry.shape[1] for entry in self.linears)
        clipped = sum(e.saturation * e.shape[0] * e.shape[1] for e in self.linears)
        return clipped / weights if weights else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**asdict(self), "saturation": self.saturation}

    def table(self) -> Table:
        """One row a linear, for ``rich``, in 80 columns; names without their prefix ``model.``."""
        table = Table(
            title=f"Nested {len(self.linears)} linears",
            caption=self.caption(),
            box=box.SIMPLE,
            collapse_padding=True,
            pad_edge=False,
            show_edge=False,
        )
        table.add_column("linear", no_wrap=True)
        for header in ("shape", "draft\nerror", "target\nerror", "saturated", "damp", "dead"):
            table.add_column(header, justify="right")
        for entry in self.linears:
            table.add_row(
                entry.name.removeprefix("model."),
                f"{entry.shape[0]}x{entry.shape[1]}",
                f"{entry.draft_error:.2%}",
                f"{entry.target_error:.3%}",
                f"{entry.saturation:.2%}",
                "-" if entry.damping is None else f"{entry.damping:g}",
                str(entry.dead_columns),
            )
        return table

    def caption(self) -> str:
        """Totals in one line."""
        seconds = ", ".join(f"{stage} {value:.1f} s" for stage, value in self.seconds.items())
        return (
            f"{self.calibration_tokens} calibration tokens, {self.hessian_tokens} of them in "
            f"Hessians; {self.saturation:.2%} of refinement codes saturated; {seconds}"
        )

    def print(self, console: Console | None = None) -> None:
        """Print the table and the notes."""
        console = console or Console()
        console.print(self.table())
        for note in self.notes:
            console.print(f"note: {note}", markup=False)
