"""From eigenvalues, or from estimates, to the numbers of a record."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from orthocond.linalg._spectrum import spectrum_of

__all__ = ["CONDITIONS", "NUMBERS", "Estimated", "Key", "Measured", "Reading", "cells", "numbers"]

CONDITIONS = ("cond", "cond_support", "cond_eps", "cond_floor")
NUMBERS = (*CONDITIONS, "rank")
_FLOOR = torch.finfo(torch.float64).eps


class Key(NamedTuple):
    """What is known of a record at once."""

    step: int
    layer: str
    mode: Literal["train", "eval"]
    failures: int
    estimated: bool = False


class Measured(NamedTuple):
    """What was measured of the covariances of a layer."""

    eigenvalues: Tensor
    """``(..., n)``"""
    floor: Tensor | None = None
    """``(...)``: the rounding noise of each covariance, where it is known."""
    clamp: bool = False
    """Whether the layer raises eigenvalues to ``eps`` instead of adding it."""

    def numbers(self, eps: float, rtol: float) -> Tensor:
        """Return for several records `NUMBERS` of the worst matrix, from eigenvalues ``(records, matrices, n)``."""
        eigenvalues = self.eigenvalues
        found = spectrum_of(eigenvalues, eps=eps, rtol=rtol, floor=self.floor, clamp=self.clamp)
        raised = eigenvalues.clamp(min=_FLOOR)
        floored = raised.amax(-1) / raised.amin(-1)
        conditions = torch.stack([found.cond, found.cond_support, found.cond_eps, floored], -1)
        conditions = torch.where(eigenvalues.isnan().any(-1, keepdim=True), torch.nan, conditions)
        return torch.cat([conditions.amax(1), found.rank.amin(1, keepdim=True).to(conditions.dtype)], 1)


class Estimated(NamedTuple):
    """What a layer without eigenvalues estimated of its covariances, and the layer's own ``eps``."""

    cond: Tensor
    """``(...)``"""
    rank: Tensor
    """``(...)``"""
    size: int
    """Number of channels: with as high a rank nothing was dropped."""
    eps: float

    def numbers(self, eps: float, _: float) -> Tensor:
        """Return the same from estimates ``(records, matrices)``; what they don't tell is NaN.

        The estimate is about what the layer inverts. With its ``eps`` that is ``P + eps I``, whose condition number is
        ``cond_eps``. Without, it is what was not dropped; if that is everything, ``cond_support`` is ``cond``.
        """
        cond, unknown = self.cond.amax(1), torch.full_like(self.cond[:, 0], torch.nan)
        if self.eps:
            known = {"cond_eps": cond} if eps == self.eps else {}
        else:
            whole = torch.where((self.rank >= self.size).all(1), cond, torch.nan)
            known = {"cond_support": cond, "cond": whole} | ({} if eps else {"cond_eps": whole})
        return torch.stack(
            [*(known.get(name, unknown) for name in CONDITIONS), self.rank.nan_to_num(0.0).amin(1).to(cond)], 1
        )


Reading = tuple[Key, Measured | Estimated, float]
"""What was seen of a layer in one forward, and the ``eps`` for it."""


def numbers(readings: Sequence[Reading], rtol: float) -> list[Tensor]:
    """Return `NUMBERS` for each reading: many at a time, since one by one that would cost as much as a layer."""
    alike: dict[Hashable, list[int]] = {}
    for i, (_, seen, eps) in enumerate(readings):
        alike.setdefault((type(seen), *map(_kind, seen), eps), []).append(i)
    rows: dict[int, Tensor] = {}
    for indices in alike.values():
        _, first, eps = readings[indices[0]]
        group: list[Any] = [readings[i][1] for i in indices]
        parts: list[Any] = [
            torch.stack(each) if isinstance(each[0], Tensor) else each[0] for each in zip(*group, strict=True)
        ]
        if isinstance(first, Measured):
            together: Any = Measured(_flat(parts[0], 1), _flat(parts[1], 0), parts[2])
        else:
            together = Estimated(_flat(parts[0], 0), _flat(parts[1], 0), *parts[2:])
        rows.update(zip(indices, together.numbers(eps, rtol), strict=True))
    return [rows[i] for i in range(len(readings))]


def _kind(part: Any) -> Hashable:
    return (part.shape, part.dtype, part.device) if isinstance(part, Tensor) else part


def _flat(part: Any, num_last: int) -> Any:
    """Return ``(records, ..., *last)`` as ``(records, matrices, *last)``."""
    return part if part is None else part.reshape(len(part), -1, *part.shape[part.ndim - num_last :])


def cells(record: Mapping[str, Any]) -> list[str]:
    """Return a record's numbers as text: ``~`` in front of estimates, ``-`` where the estimate doesn't tell."""
    about = "~" if record["estimated"] else ""
    shown = ["-" if about and math.isnan(record[name]) else f"{about}{record[name]:.3g}" for name in CONDITIONS]
    return [f"{about}{record['rank']}", *shown]
