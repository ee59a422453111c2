"""Checks that a decomposition is one, by its products with a vector.

Solvers have been seen to return wrong eigenvectors without an error (pytorch issue 192483). For ``A = U L U^H`` and a
vector ``x`` in general position, ``A x = U L U^H x`` and ``U U^H x = x`` hold only if the decomposition does, up to a
set of vectors of measure zero. That takes four products with a vector. NaN anywhere fails both comparisons.

The bound: a solver returns the exact decomposition of ``A + E`` with ``|E| <= p n u |A|`` and vectors that are
orthogonal up to ``p n u``, with the relative spacing ``u`` of the dtype and a modest ``p``; LAPACK's own tests allow
``p = 60``, and name 500 as the limit of the theory, which is taken here. The rounding of the four products, each at
most ``n u / 2`` times ``|A| |x|``, is far below that. Errors are measured without squares that could overflow, and
``|x| = 1``, so that no product exceeds ``|A|``. Where ``A`` itself is below the
normal numbers, an error of their size counts as none.

Reference: Anderson et al., LAPACK Users' Guide (SIAM 1999), chapter 4; LAPACK, TESTING/sep.in and dsyt21.
"""

import math
import random
from typing import NamedTuple

import torch
from torch import Tensor

from orthocond._core import private

__all__ = ["Verdict", "allowed_error", "lowest_of", "probe", "verified_eigen", "verified_one", "verified_svd"]

_ALLOWED = 500
_probes: dict[tuple[int, torch.dtype, torch.device], "Probe"] = {}
_MOST_PROBES = 256


class Verdict(NamedTuple):
    """What a check found."""

    wrong: Tensor | None
    """Which matrices of the batch ``(b,)`` have a wrong decomposition; None if no one has."""
    lowest: float
    """The smallest eigenvalue over the largest absolute one, where it is the lowest in the batch."""
    asymmetry: float = 0.0
    """The asymmetry that was passed in."""


class Probe(NamedTuple):
    """The vector of a size, dtype and device, and the error that a right result may have there."""

    x: Tensor
    """``(n,)``"""
    entries: list[float]
    """Those of ``x``."""
    bound: float
    """Relative to the size of the matrices."""
    tiny: float
    """Absolute."""


def verified_eigen(A: Tensor, eigenvalues: Tensor, U: Tensor, asymmetry: Tensor | None = None) -> Verdict:
    """Check eigenvalues in ascending order and eigenvectors of symmetric matrices ``(..., n, n)``.

    All numbers that decide are fetched from the device at once, ``asymmetry`` with them.
    """
    n = A.shape[-1]
    if not A.numel():
        return Verdict(None, 0.0, 0.0)
    if A.numel() == n * n and A.is_cpu and not A.is_complex():
        matrix = A.view(n, n)
        known = probe(n, A.dtype, A.device)
        product = matrix.mv(known.x).tolist()
        values = verified_one(known, product, eigenvalues.view(n), U.flatten(0, -3).squeeze(0) if U.ndim > 2 else U)
        asymmetric = 0.0 if asymmetry is None else asymmetry.item()
        if values is None:
            return Verdict(torch.ones(1, dtype=torch.bool), 0.0, asymmetric)
        return Verdict(None, lowest_of(values), asymmetric)
    if A.ndim != 3:
        A, eigenvalues, U = A.reshape(-1, n, n), eigenvalues.reshape(-1, n), U.reshape(-1, n, n)
    # Of the whole batch with the one vector, which is real: products with one matrix, and U is stored by columns.
    x, _, bound, tiny = probe(n, A.dtype, A.device)
    y = U.mT.reshape(-1, n).mv(x).view(-1, n).conj()
    of_A = A.reshape(-1, n).mv(x).view(-1, n)
    expected = torch.stack([x.expand_as(of_A), of_A], -1)
    errors = torch.bmm(U, torch.stack([y, y * eigenvalues], -1)).sub_(expected).abs().amax(1)
    smallest, largest = eigenvalues[:, 0], torch.maximum(eigenvalues[:, -1], -eigenvalues[:, 0])
    right = (
        (errors[:, 0] <= bound)
        & (errors[:, 1] < bound * largest + tiny)
        & (eigenvalues[:, 1:] >= eigenvalues[:, :-1]).all(-1)
    )
    lowest = (smallest / torch.where(largest > 0, largest, 1.0)).amin()
    numbers = [right.all().to(lowest), lowest, torch.zeros_like(lowest) if asymmetry is None else asymmetry.to(lowest)]
    all_right, lowest, asymmetric = torch.stack(numbers).tolist()
    return Verdict(None if all_right else ~right, lowest, asymmetric)


def verified_one(known: Probe, of_A: list[float], eigenvalues: Tensor, U: Tensor) -> list[float] | None:
    """Check the decomposition of one real matrix ``(n, n)`` on the CPU by its product ``of_A`` with the probe.

    Its numbers are at hand, and they are compared faster than tensors. Returns the eigenvalues if all is right.
    """
    x, entries, bound, tiny = known
    values: list[float] = eigenvalues.tolist()
    y = U.mT.mv(x)
    is_right = (
        math.dist(U.mv(y).tolist(), entries) <= bound
        and math.dist(U.mv(y.mul_(eigenvalues)).tolist(), of_A) < bound * max(values[-1], -values[0]) + tiny
        and values == sorted(values)
    )
    return values if is_right else None


def lowest_of(values: list[float]) -> float:
    """Return the smallest over the largest absolute one of eigenvalues in ascending order."""
    largest = max(values[-1], -values[0])
    return values[0] / largest if largest > 0 else 0.0


def verified_svd(A: Tensor, U: Tensor, singular_values: Tensor, Vh: Tensor) -> Tensor | None:
    """Check the thin decomposition of wide matrices ``(..., m, n)``; return which are wrong, None if no one is.

    ``A x = U S V^H x``, and ``U`` and ``V^H`` have orthonormal rows; the singular values descend and are not negative.
    """
    m, n = A.shape[-2:]
    if not A.numel():
        return None
    A, U, s, Vh = A.reshape(-1, m, n), U.reshape(-1, m, m), singular_values.reshape(-1, m), Vh.reshape(-1, m, n)
    x, z = _probes_like(A, n), _probes_like(A, m)
    residual = torch.baddbmm(torch.bmm(U, torch.bmm(Vh, x) * s.unsqueeze(-1)), A, x, beta=-1)
    turned = torch.cat([torch.bmm(U, torch.bmm(U.mH, z)) - z, torch.bmm(Vh, torch.bmm(Vh.mH, z)) - z], -1)
    bound, tiny = allowed_error(n, A.dtype)
    right = (
        (_sizes(turned) <= bound)
        & (_sizes(residual) < bound * s[:, 0] + tiny)
        & (s[:, 1:] <= s[:, :-1]).all(-1)
        & (s[:, -1] >= 0)
    )
    return None if right.all() else ~right


def allowed_error(n: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error that a right result may have: relative to the size of the matrices, and absolute."""
    about = torch.finfo(dtype)
    return _ALLOWED * n * about.eps, about.tiny


def _sizes(x: Tensor) -> Tensor:
    sizes: Tensor = torch.linalg.vector_norm(x, math.inf, dim=(-2, -1))
    return sizes


def _probes_like(A: Tensor, n: int) -> Tensor:
    """Return the vector for each of the matrices ``A`` ``(b, ...)``: ``(b, n, 1)``."""
    return probe(n, A.dtype, A.device)[0].view(1, n, 1).expand(A.shape[0], n, 1)


def probe(n: int, dtype: torch.dtype, device: torch.device) -> Probe:
    """Return the vector ``(n,)``: always the same for a size, so that results can be reproduced.

    It comes from a generator of its own: the user's random state stays as it is. No entry is small, so that diagonal
    matrices are checked as well as others.
    """
    n = int(n)  # torch.jit.trace has sizes that are tensors
    key = (n, dtype, device)
    known = None if private.is_tracing() else _probes.get(key)  # a tensor is constant in one traced function only
    if known is not None:
        return known
    generator = random.Random(n)  # a vector in general position, not a secret
    entries = [generator.choice((-1, 1)) * generator.uniform(1, 2) for _ in range(n)]
    norm = math.hypot(*entries)
    with torch.inference_mode(False):
        x = torch.tensor([entry / norm for entry in entries], dtype=dtype, device=device)
    made = Probe(x, x.tolist(), *allowed_error(n, dtype))
    if type(x) is Tensor:  # and no fake of it
        if len(_probes) >= _MOST_PROBES:
            _probes.clear()
        _probes[key] = made
    return made
