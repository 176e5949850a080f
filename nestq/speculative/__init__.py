"""Speculative decoding of one nested model."""

from nestq.speculative.generate import SpeculativeOutput, decode, speculative_generate
from nestq.speculative.graphs import release_graphs
from nestq.speculative.metrics import DecodingMetrics

__all__ = [
    "DecodingMetrics",
    "SpeculativeOutput",
    "decode",
    "release_graphs",
    "speculative_generate",
]
