"""The derivatives of a spectral function in the eigenbasis, with eigenvalues that are kept and some that are dropped.

For ``f(A) = U diag(f(l)) U^H`` the derivative is ``U (F o (U^H H U)) U^H`` with the first divided differences ``F_ij =
(f(l_i) - f(l_j)) / (l_i - l_j)`` (Daleckii and Krein), and the second derivative has the second ones. Between kept
eigenvalues they are those of the function (`_functions.py`), in closed form: equal eigenvalues are nothing special.

A dropped eigenvalue has ``f = 0``. Between a kept ``i`` and a dropped ``j`` the difference is ``f(l_i) / (l_i - l_j)``,
between two dropped ones it is 0. The function jumps where an eigenvalue crosses the cut-off, so a gap narrower than the
cut-off itself counts as that wide: the gradient stays bounded there, and is exact everywhere else.

A clamped function is ``h = f(p)`` of ``p = max(l, eps)``. By the chain rule for divided differences, with ``m`` those
of the maximum,

    h[i,j] = f[p_i,p_j] m[i,j],    h[i,j,k] = f[p_i,p_j,p_k] m[i,j] m[i,k] + f[p_j,p_k] m[i,j,k]

and these have no cancellation either: ``m[i,j]`` is 1 above ``eps``, 0 at or below it, and across it the distance of
the upper eigenvalue from ``eps`` over the gap.

Reference: N. J. Higham, Functions of Matrices (SIAM 2008), section 3.2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from orthocond.linalg._functions import SQRT, Chosen, is_clamped, spectral_function

__all__ = ["SMALLEST", "Split", "first_differences", "most_dropped", "second_derivative", "shifted", "split", "values"]

SMALLEST = torch.finfo(torch.float64).tiny
"""Below the normal numbers, 2e-308, there is no relative accuracy: such an eigenvalue counts as zero."""


class Split(NamedTuple):
    """The eigenvalues of a symmetric matrix, split into those that are kept and those that are dropped."""

    eigenvalues: Tensor
    """``(..., n)``"""
    points: Tensor
    """Where the function is taken: ``l + eps``, or clamped ``max(l, eps)``, ``(..., n)``; 1 where dropped."""
    kept: Tensor | None
    """``(..., n)``, or None where nothing is dropped."""
    cutoff: Tensor | None
    """``(..., 1)``: what is at or below it is dropped."""
    bound: Tensor | None = None
    """``(..., 1)``: the ``eps`` of a clamped function; None where it was added."""


def split(
    eigenvalues: Tensor, eps: float, rtol: float | None, floor: Tensor | None = None, *, function: Chosen = SQRT
) -> Split:
    """Return which of the eigenvalues, in ascending order, are kept, and where the function is taken.

    What is at or below ``rtol`` times the largest is dropped, and what is at or below ``floor`` ``(...)``, the rounding
    noise of the matrix. Where ``eps`` is as large as that noise it outweighs it, and the floor drops nothing;
    ``rtol=None`` drops nothing either. A function of the whole line takes eigenvalues of any sign: they are taken as
    they are, and there is no floor.
    """
    if is_clamped(function):
        bound = torch.zeros_like(eigenvalues[..., :1]) + eps  # a tensor: `torch.compile` would make a number a constant
        parts = split(eigenvalues, eps, rtol, floor)
        raised = torch.maximum(eigenvalues, bound.clamp(min=SMALLEST))
        points = raised if parts.kept is None else torch.where(parts.kept, raised, 1.0)
        return Split(eigenvalues, points, parts.kept, parts.cutoff, bound)  # torch 2.8 can't compile _replace
    if rtol is None and spectral_function(function)[0].whole_line:
        return Split(eigenvalues, eigenvalues + eps, None, None)
    # A comparison of numbers is much cheaper than work with masks, but only the CPU has the numbers at hand.
    is_known = eigenvalues.device.type == "cpu" and not torch.compiler.is_compiling()
    if floor is not None and is_known and not (floor > eps).any():
        floor = None
    noise = None if floor is None else torch.where(floor > eps, floor.to(eigenvalues), -torch.inf).unsqueeze(-1)
    if rtol is None and noise is not None:
        kept = eigenvalues > noise
        raised = shifted(eigenvalues, eps).clamp_(min=SMALLEST)
        return Split(eigenvalues, torch.where(kept, raised, 1.0), kept, noise)
    if rtol is None:
        # Below zero is rounding noise of a matrix that should be positive semi-definite: where eps outweighs it, it
        # counts like everything else, and where it doesn't, it may at most halve eps.
        raised = shifted(eigenvalues, eps)
        return Split(eigenvalues, raised if eps > 2 * SMALLEST else raised.clamp_(min=SMALLEST), None, None)
    if is_known and _all_kept(eigenvalues, rtol, noise):
        return Split(eigenvalues, eigenvalues + eps if eps else eigenvalues, None, None)  # the same, for less
    cutoff = _cutoff(eigenvalues, rtol, noise)
    kept = eigenvalues > cutoff
    return Split(eigenvalues, torch.where(kept, eigenvalues + eps, 1.0), kept, cutoff)


def shifted(eigenvalues: Tensor, eps: float) -> Tensor:
    """Return ``max(l, -eps / 2) + eps``: what is below zero may at most halve ``eps``."""
    if torch.compiler.is_compiling():  # a bound of clamp is a constant of the graph: each eps would be compiled again
        return (eigenvalues + eps / 2).clamp(min=0.0) + eps / 2
    return eigenvalues.clamp(min=-eps / 2).add_(eps)


def _all_kept(eigenvalues: Tensor, rtol: float, noise: Tensor | None) -> bool:
    if eigenvalues.numel() == eigenvalues.shape[-1] > 0:  # of one matrix: numbers are compared faster than tensors
        line = eigenvalues.view(-1)
        return line[0].item() > max(rtol * line[-1].item(), SMALLEST, 0.0 if noise is None else noise.item())
    return bool((eigenvalues[..., :1] > _cutoff(eigenvalues, rtol, noise)).all())


def _cutoff(eigenvalues: Tensor, rtol: float, noise: Tensor | None) -> Tensor:
    relative = (rtol * eigenvalues[..., -1:]).clamp_(min=SMALLEST)
    return relative if noise is None else torch.maximum(relative, noise)


def values(parts: Split, function: Chosen) -> Tensor:
    """Return ``f(l)`` ``(..., n)``."""
    entry, options = spectral_function(function)
    f = entry.value(parts.points, *options)
    return f if parts.kept is None else f * parts.kept


def first_differences(parts: Split, function: Chosen) -> Tensor:
    """Return the exact ``F`` ``(..., n, n)``."""
    entry, options = spectral_function(function)
    F = entry.first(parts.points, *options)
    if parts.bound is not None:
        F = F * _slopes(parts.eigenvalues, parts.bound)
    if parts.kept is None:
        return F
    f = values(parts, function)
    rows = most_dropped(parts)
    R = _inverse_gaps(parts.eigenvalues, parts.kept, parts.cutoff, rows)
    across = R * (f[..., :rows].unsqueeze(-1) + f.unsqueeze(-2))  # one of the two is zero
    replaced = torch.where(_both(parts.kept, rows), F[..., :rows, :], across)
    if rows == F.shape[-1]:
        return replaced
    F[..., :rows, :] = replaced
    F[..., rows:, :rows] = replaced[..., rows:].mT
    return F


def most_dropped(parts: Split) -> int:
    """Return the largest number of dropped eigenvalues of a matrix, which are its first, or ``n`` where it isn't known.

    Only the CPU has the number at hand.
    """
    assert parts.kept is not None
    if not parts.kept.is_cpu or torch.compiler.is_compiling():
        return parts.kept.shape[-1]
    # The first column from which on all are kept.
    columns = parts.kept.flatten(0, -2).all(0) if parts.kept.ndim > 1 else parts.kept
    return columns.shape[0] - int(columns.sum())


def second_derivative(parts: Split, function: Chosen, G: Tensor, H: Tensor) -> Tensor:
    """Return the derivative of ``<H, F o G>`` with respect to the matrix, all in the eigenbasis and Hermitian.

    With the second divided differences ``f[i,j,k]`` it is ``W + W^H``, ``W_ik = sum_j f[i,j,k] H_ij G_jk``. Those of
    three kept eigenvalues are the function's; with dropped ones they are products of functions of two indices, so that
    the sums over ``j`` are matrix products:

        i, j kept, k not:  (F_ij - f_j R_jk) R_ik
        i kept, j, k not:  f_i R_ij R_ik

    where ``R_ij = 1 / |l_i - l_j|`` between kept and dropped.
    """
    if parts.kept is None:
        W = _second(parts, function, G, H)
    else:
        inner = _both(parts.kept)
        W = inner * _second(parts, function, inner * G, inner * H)
        f = values(parts, function).unsqueeze(-2)
        F = first_differences(parts, function) * inner
        R = _inverse_gaps(parts.eigenvalues, parts.kept, parts.cutoff)
        crossing = R > 0
        RG, RH = R * G, R * H
        W = W + R * ((F * H) @ (crossing * G) - (inner * H * f) @ RG)  # k dropped
        W = W + R * ((crossing * H) @ (F * G) - (RH * f) @ (inner * G))  # i dropped
        W = W + F * (RH @ (crossing * G)) - inner * (RH @ RG) * f  # j dropped
        W = W + f.mT * R * (RH @ G) + (RH * f) @ RG + R * (H @ RG) * f  # only i, only j, only k kept
    return W + W.mH


def _second(parts: Split, function: Chosen, G: Tensor, H: Tensor) -> Tensor:
    """Return ``W`` between kept eigenvalues.

    The differences ``m[i,j,k]`` of the maximum are zero unless ``eps`` separates one of the three from the other two.
    For the one apart, ``x``, they are ``s_x R_xy R_xz`` with its distance ``s_x`` from ``eps`` and the inverse gaps
    ``R`` across ``eps``.
    """
    entry, options = spectral_function(function)
    if parts.bound is None:
        return entry.second(parts.points, G, H, *options)
    m = _slopes(parts.eigenvalues, parts.bound)
    W = m * entry.second(parts.points, G, m * H, *options)
    FG = entry.first(parts.points, *options) * G
    R = _inverse_gaps(parts.eigenvalues, parts.eigenvalues > parts.bound)
    s = (parts.eigenvalues - parts.bound).abs().unsqueeze(-2)
    RH, RFG = R * H, R * FG
    return W + R * (s.mT * (RH @ FG) + (H @ RFG) * s) + (RH * s) @ RFG  # i, k, and j apart


def _slopes(l: Tensor, bound: Tensor) -> Tensor:
    """Return the first divided differences ``m`` ``(..., n, n)`` of ``max(l, bound)``; at the bound the slope is 0."""
    is_above, above = l > bound, (l - bound).clamp(min=0)
    across = (above.unsqueeze(-1) + above.unsqueeze(-2)) * _inverse_gaps(l, is_above)  # one of the two is zero
    return torch.where(_both(is_above), 1.0, across)


def _both(chosen: Tensor, rows: int | None = None) -> Tensor:
    """Return where both eigenvalues are chosen, in the first rows or in all ``(..., rows, n)``."""
    return chosen[..., :rows].unsqueeze(-1) & chosen.unsqueeze(-2)


def _inverse_gaps(l: Tensor, upper: Tensor, narrowest: Tensor | None = None, rows: int | None = None) -> Tensor:
    """Return ``1 / |l_i - l_j|`` between the upper eigenvalues and the others, 0 elsewhere; all rows, or the first.

    A gap below ``narrowest`` ``(..., 1)`` counts as that wide.
    """
    gaps = (l[..., :rows].unsqueeze(-1) - l.unsqueeze(-2)).abs()
    if narrowest is not None:
        gaps = torch.maximum(gaps, narrowest.unsqueeze(-1))
    return torch.where(upper[..., :rows].unsqueeze(-1) ^ upper.unsqueeze(-2), gaps, torch.inf).reciprocal()
