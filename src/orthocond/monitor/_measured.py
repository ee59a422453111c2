"""From eigenvalues to the numbers of a record."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from orthocond.linalg._spectrum import spectrum_of

__all__ = ["CONDITIONS", "NUMBERS", "Key", "Measured", "numbers"]

CONDITIONS = ("cond", "cond_support", "cond_eps", "cond_floor")
NUMBERS = (*CONDITIONS, "rank")
_FLOOR = torch.finfo(torch.float64).eps


class Key(NamedTuple):
    """What is known of a record at once."""

    step: int
    layer: str
    mode: Literal["train", "eval"]
    failures: int


class Measured(NamedTuple):
    """What was measured of the covariances of a layer."""

    eigenvalues: Tensor
    """``(..., n)``"""
    floor: Tensor | None = None
    """``(...)``: the rounding noise of each covariance, where it is known."""
    clamp: bool = False
    """Whether the layer raises eigenvalues to ``eps`` instead of adding it."""


def numbers(measured: Measured, eps: float, rtol: float) -> Tensor:
    """Return for several records `NUMBERS` of the worst matrix, from eigenvalues ``(records, matrices, n)``."""
    eigenvalues, floor, clamp = measured
    found = spectrum_of(eigenvalues, eps=eps, rtol=rtol, floor=floor, clamp=clamp)
    raised = eigenvalues.clamp(min=_FLOOR)
    conditions = torch.stack([found.cond, found.cond_support, found.cond_eps, raised.amax(-1) / raised.amin(-1)], -1)
    conditions = torch.where(eigenvalues.isnan().any(-1, keepdim=True), torch.nan, conditions)
    return torch.cat([conditions.amax(1), found.rank.amin(1, keepdim=True).to(conditions.dtype)], 1)
