"""The derivatives of a spectral function in the eigenbasis, with eigenvalues that are kept and some that are dropped.

For ``f(A) = U diag(f(l)) U^H`` the derivative is ``U (F o (U^H H U)) U^H`` with the first divided differences ``F_ij =
(f(l_i) - f(l_j)) / (l_i - l_j)`` (Daleckii and Krein), and the second derivative has the second ones. Between kept
eigenvalues they are those of the function (`_functions.py`), in closed form: equal eigenvalues are nothing special.

A dropped eigenvalue has ``f = 0``. Between a kept ``i`` and a dropped ``j`` the difference is ``f(l_i) / (l_i - l_j)``,
between two dropped ones it is 0. The function jumps where an eigenvalue crosses the cut-off, so a gap narrower than the
cut-off itself counts as that wide: the gradient stays bounded there, and is exact everywhere else.

Reference: N. J. Higham, Functions of Matrices (SIAM 2008), section 3.2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from orthocond.linalg._functions import Chosen, spectral_function

__all__ = ["SMALLEST", "Split", "first_differences", "second_derivative", "shifted", "split", "values"]

SMALLEST = torch.finfo(torch.float64).tiny
"""Below the normal numbers, 2e-308, there is no relative accuracy: such an eigenvalue counts as zero."""


class Split(NamedTuple):
    """The eigenvalues of a symmetric matrix, split into those that are kept and those that are dropped."""

    eigenvalues: Tensor
    """``(..., n)``"""
    points: Tensor
    """Where the function is taken: ``l + eps`` ``(..., n)``; 1 where dropped."""
    kept: Tensor | None
    """``(..., n)``, or None where nothing is dropped."""
    cutoff: Tensor | None
    """``(..., 1)``: what is at or below it is dropped."""


def split(
    eigenvalues: Tensor, eps: float, rtol: float | None, floor: Tensor | None = None, *, whole_line: bool = False
) -> Split:
    """Return which of the eigenvalues, in ascending order, are kept.

    What is at or below ``rtol`` times the largest is dropped, and what is at or below ``floor`` ``(...)``, the rounding
    noise of the matrix. Where ``eps`` is as large as that noise it outweighs it, and the floor drops nothing;
    ``rtol=None`` drops nothing either. With ``whole_line`` the function takes eigenvalues of any sign: they are taken
    as they are, and there is no floor.
    """
    if rtol is None and whole_line:
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
    if parts.kept is None:
        return F
    f = values(parts, function)
    across = _inverse_gaps(parts) * (f.unsqueeze(-1) + f.unsqueeze(-2))  # one of the two is zero
    return torch.where(_both_kept(parts), F, across)


def second_derivative(parts: Split, function: Chosen, G: Tensor, H: Tensor) -> Tensor:
    """Return the derivative of ``<H, F o G>`` with respect to the matrix, all in the eigenbasis and Hermitian.

    With the second divided differences ``f[i,j,k]`` it is ``W + W^H``, ``W_ik = sum_j f[i,j,k] H_ij G_jk``. Those of
    three kept eigenvalues are the function's; with dropped ones they are products of functions of two indices, so that
    the sums over ``j`` are matrix products:

        i, j kept, k not:  (F_ij - f_j R_jk) R_ik
        i kept, j, k not:  f_i R_ij R_ik

    where ``R_ij = 1 / |l_i - l_j|`` between kept and dropped.
    """
    entry, options = spectral_function(function)
    if parts.kept is None:
        W = entry.second(parts.points, G, H, *options)
    else:
        inner = _both_kept(parts)
        W = inner * entry.second(parts.points, inner * G, inner * H, *options)
        f = values(parts, function).unsqueeze(-2)
        F = first_differences(parts, function) * inner
        R = _inverse_gaps(parts)
        crossing = R > 0
        RG, RH = R * G, R * H
        W = W + R * ((F * H) @ (crossing * G) - (inner * H * f) @ RG)  # k dropped
        W = W + R * ((crossing * H) @ (F * G) - (RH * f) @ (inner * G))  # i dropped
        W = W + F * (RH @ (crossing * G)) - inner * (RH @ RG) * f  # j dropped
        W = W + f.mT * R * (RH @ G) + (RH * f) @ RG + R * (H @ RG) * f  # only i, only j, only k kept
    return W + W.mH


def _both_kept(parts: Split) -> Tensor:
    assert parts.kept is not None
    return parts.kept.unsqueeze(-1) & parts.kept.unsqueeze(-2)


def _inverse_gaps(parts: Split) -> Tensor:
    """Return ``1 / |l_i - l_j|`` between kept and dropped eigenvalues, 0 elsewhere."""
    assert parts.kept is not None
    assert parts.cutoff is not None
    gaps = (parts.eigenvalues.unsqueeze(-1) - parts.eigenvalues.unsqueeze(-2)).abs()
    crossing = parts.kept.unsqueeze(-1) ^ parts.kept.unsqueeze(-2)
    return torch.where(crossing, torch.maximum(gaps, parts.cutoff.unsqueeze(-1)), torch.inf).reciprocal()
