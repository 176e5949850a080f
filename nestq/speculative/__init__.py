"""Speculative decoding of one nested model."""

from nestq.speculative.generate import SpeculativeOutput, decode, speculative_generate
from nestq.speculative.metrics import DecodingMetrics

__all__ = ["DecodingMetrics", "SpeculativeOutput", "decode", "speculative_generate"]
