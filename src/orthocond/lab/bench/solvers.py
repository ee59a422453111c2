"""``bench solvers``: time, memory and error of the inverse root, for every solver and rule and for the alternatives.

The reference of every ratio is `torch.linalg.eigh` in float64, forward alone, of the same matrices in the same round.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orthocond import linalg
from orthocond.lab.bench.measure import (
    Budget,
    Contestant,
    alternate,
    forward_backward,
    growth_exponent,
    once,
    saved_bytes,
    spread,
)
from orthocond.lab.bench.peers import inverse_roots, shifted
from orthocond.lab.bench.problems import EPS, SPECTRA, Problem, problem

__all__ = ["ACCURATE", "DEFAULT", "Cell", "cells", "contestants", "growth", "measure"]

Root = Callable[[Tensor], Tensor]

ACCURATE = 1e-4
"""A gradient with a relative error below this is good enough to train with."""
DEFAULT = "eigh + exact"
_REFERENCE = "torch.linalg.eigh, forward alone, float64"

# The work of a decomposition grows as batch * size^3. Above the first bound a single spectrum is measured;
# above the second a single round would take minutes.
_ALL_SPECTRA, _ANY = 64 * 128**3, 64 * 256**3


@dataclass(frozen=True)
class Cell:
    """One of the problems in the table."""

    size: int
    batch: int
    spectrum: str


def cells(*, quick: bool) -> Iterator[Cell]:
    """Yield the measured cells: sizes x batches x spectra, as far as time permits."""
    for size in (16, 32) if quick else (16, 32, 64, 128, 256, 512):
        for batch in (1, 4) if quick else (1, 64, 256):
            work = batch * size**3
            spectra = list(SPECTRA) if work <= _ALL_SPECTRA else list(SPECTRA)[: 1 if work <= _ANY else 0]
            yield from (Cell(size, batch, spectrum) for spectrum in spectra)


def contestants() -> dict[str, Root]:
    """Return the functions that compute ``(A + eps I)^(-1/2)`` with a gradient, by name.

    Ours work in float64 inside, so those that don't compete in float64, too.
    """
    ours: dict[str, dict[str, Any]] = {f"eigh + {rule}": {"gradient": rule} for rule in linalg.GRADIENTS}
    others = inverse_roots()
    ours |= {solver: {"solver": solver} for solver in linalg.SOLVERS if solver != "eigh"}
    return {
        **{name: functools.partial(linalg.matrix_inv_sqrth, eps=EPS, **options) for name, options in ours.items()},
        "autograd, eigh": through_eigh,
        "autograd, eigh in float64": _in_float64(through_eigh),
        "autograd, svd": through_svd,
        **{name: shifted(root, EPS) for name, root in others.items()},
        **{f"{name} in float64": _in_float64(shifted(root, EPS)) for name, root in others.items()},
    }


def _in_float64(root: Root) -> Root:
    return lambda A: root(A.double()).to(A.dtype)


def through_eigh(A: Tensor) -> Tensor:
    """Return the inverse root as it is usually written: the gradient goes through the eigenvectors."""
    l, U = torch.linalg.eigh(A)
    root: Tensor = (U * (l + EPS).rsqrt().unsqueeze(-2)) @ U.mT
    return root


def through_svd(A: Tensor) -> Tensor:
    """Return the inverse root as the paper's code writes it."""
    U, l, _ = torch.linalg.svd(A)
    root: Tensor = (U * (l + EPS).rsqrt().unsqueeze(-2)) @ U.mT
    return root


def measure(cell: Cell, *, quick: bool) -> list[dict[str, Any]]:
    """Return a record for each contestant."""
    asked = problem(cell.size, cell.batch, cell.spectrum)
    records: list[dict[str, Any]] = []
    running: dict[str, Contestant] = {}
    for name, root in contestants().items():
        record: dict[str, Any] = {"size": cell.size, "batch": cell.batch, "spectrum": cell.spectrum, "contestant": name}
        try:
            record |= _judged(root, asked)
        except Exception as error:  # other packages may raise anything; the others continue
            record["failed"] = next(iter(str(error).strip().splitlines()), type(error).__name__)
        else:
            running[name] = forward_backward(root, asked.A, asked.G)
        records.append(record)
    large = cell.batch * cell.size**3 > _ALL_SPECTRA
    budget = Budget(0.0, fewest=3) if quick or large else Budget(2.0, fewest=5, most=200)
    wide = asked.A.double()
    everyone = {**running, _REFERENCE: once(lambda: torch.linalg.eigh(wide))}
    passes = alternate(everyone, budget)
    for record in records:
        if (own := passes.get(record["contestant"])) is not None:
            record["forward"] = spread(own, passes[_REFERENCE], part=0)._asdict()
            record["total"] = spread(own, passes[_REFERENCE])._asdict()
    return records


def _judged(root: Root, asked: Problem) -> dict[str, Any]:
    A = asked.A.clone().requires_grad_()
    value = root(A)
    (gradient,) = torch.autograd.grad(value, A, asked.G)
    errors = {"value_error": asked.value_error(value), "gradient_error": asked.gradient_error(gradient)}
    finite = {name: error if math.isfinite(error) else None for name, error in errors.items()}
    return {**finite, "saved": saved_bytes(lambda: root(A)) / asked.A.nbytes}


def growth(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each contestant how its time grows: with the size for each batch, with the batch for each size."""
    timed = [r for r in records if "total" in r and r["spectrum"] == next(iter(SPECTRA))]
    found = []
    for name in dict.fromkeys(r["contestant"] for r in timed):
        own = {(r["size"], r["batch"]): r["total"]["seconds"] for r in timed if r["contestant"] == name}
        sizes, batches = (sorted({key[i] for key in own}) for i in (0, 1))
        in_size = {b: growth_exponent({n: own[n, b] for n in sizes if (n, b) in own}) for b in batches}
        in_batch = {n: growth_exponent({b: own[n, b] for b in batches if (n, b) in own}) for n in sizes}
        found.append(
            {
                "contestant": name,
                "in_size": {str(b): p for b, p in in_size.items() if p is not None},
                "in_batch": {str(n): p for n, p in in_batch.items() if p is not None},
            }
        )
    return found
