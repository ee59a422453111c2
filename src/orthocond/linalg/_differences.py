"""Divided differences of the roots: what their derivatives look like in the eigenbasis.

For ``f(A) = U diag(f(l)) U^T`` the derivative is ``U (F o (U^T H U)) U^T`` with the first divided differences
``F_ij = (f(l_i) - f(l_j)) / (l_i - l_j)`` (Daleckii and Krein), and the second derivative has the second ones.
For the roots the difference in the denominator cancels, with ``s_i = sqrt(l_i + eps)``:

    root:          F_ij = 1 / (s_i + s_j)
    inverse root:  F_ij = -1 / (s_i s_j (s_i + s_j))

so equal eigenvalues are nothing special. A dropped eigenvalue has ``f = 0``. Between a kept ``i`` and a dropped
``j`` the difference is ``f(l_i) / (l_i - l_j)``, between two dropped ones it is 0. The function jumps where an
eigenvalue crosses the cut-off, so a gap narrower than the cut-off itself counts as that wide: the gradient stays
bounded there, and is exact everywhere else.

Reference: N. J. Higham, Functions of Matrices (SIAM 2008), section 3.2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Split", "first_differences", "root_values", "second_derivative", "shifted", "split"]

# Eigenvalues below this have an l^(-3/2), the size of the inverse root's gradient, that is near overflow.
_SMALLEST = 1e-190


class Split(NamedTuple):
    """The eigenvalues of a symmetric matrix, split into those that are kept and those that are dropped."""

    eigenvalues: Tensor
    """``(..., n)``"""
    roots: Tensor
    """``s = sqrt(l + eps)`` ``(..., n)``; 1 where dropped."""
    kept: Tensor | None
    """``(..., n)``, or None where nothing is ever dropped."""
    cutoff: Tensor | None
    """``(..., 1)``: what is at or below it is dropped."""


def split(eigenvalues: Tensor, eps: float, rtol: float | None, floor: Tensor | None = None) -> Split:
    """Return which of the eigenvalues, in ascending order, are kept, with their roots.

    What is at or below ``rtol`` times the largest is dropped, and what is at or below ``floor`` ``(...)``, the rounding
    noise of the matrix. Where ``eps`` is as large as that noise it outweighs it, and the floor drops nothing;
    ``rtol=None`` drops nothing either.
    """
    # A comparison of numbers is much cheaper than work with masks, but only the CPU has the numbers at hand.
    is_known = eigenvalues.device.type == "cpu" and not torch.compiler.is_compiling()
    if floor is not None and is_known and not (floor > eps).any():
        floor = None
    noise = None if floor is None else torch.where(floor > eps, floor.to(eigenvalues), -torch.inf).unsqueeze(-1)
    if rtol is None and noise is not None:
        kept = eigenvalues > noise
        raised = shifted(eigenvalues, eps).clamp_(min=_SMALLEST)
        return Split(eigenvalues, torch.where(kept, raised, 1.0).sqrt(), kept, noise)
    if rtol is None:
        # Below zero is rounding noise of a matrix that should be positive semi-definite: where eps outweighs it, it
        # counts like everything else, and where it doesn't, it may at most halve eps.
        raised = shifted(eigenvalues, eps)
        roots = (raised if eps > 2 * _SMALLEST else raised.clamp_(min=_SMALLEST)).sqrt_()
        return Split(eigenvalues, roots, None, None)
    if is_known and _all_kept(eigenvalues, rtol, noise):
        return Split(eigenvalues, (eigenvalues + eps if eps else eigenvalues).sqrt(), None, None)  # the same, for less
    cutoff = _cutoff(eigenvalues, rtol, noise)
    kept = eigenvalues > cutoff
    return Split(eigenvalues, torch.where(kept, eigenvalues + eps, 1.0).sqrt(), kept, cutoff)


def shifted(eigenvalues: Tensor, eps: float) -> Tensor:
    """Return ``max(l, -eps / 2) + eps``: what is below zero may at most halve ``eps``."""
    if torch.compiler.is_compiling():  # a bound of clamp is a constant of the graph: each eps would compile anew
        return (eigenvalues + eps / 2).clamp(min=0.0) + eps / 2
    return eigenvalues.clamp(min=-eps / 2).add_(eps)


def _all_kept(eigenvalues: Tensor, rtol: float, noise: Tensor | None) -> bool:
    if eigenvalues.numel() == eigenvalues.shape[-1] > 0:  # of one matrix: numbers are compared faster than tensors
        line = eigenvalues.view(-1)
        return line[0].item() > max(rtol * line[-1].item(), _SMALLEST, 0.0 if noise is None else noise.item())
    return bool((eigenvalues[..., :1] > _cutoff(eigenvalues, rtol, noise)).all())


def _cutoff(eigenvalues: Tensor, rtol: float, noise: Tensor | None) -> Tensor:
    relative = (rtol * eigenvalues[..., -1:]).clamp_(min=_SMALLEST)
    return relative if noise is None else torch.maximum(relative, noise)


def root_values(parts: Split, power: float) -> Tensor:
    """Return ``f(l)`` ``(..., n)`` for the root (``power=0.5``) or the inverse root (``power=-0.5``)."""
    values = parts.roots if power > 0 else parts.roots.reciprocal()
    return values if parts.kept is None else values * parts.kept


def first_differences(parts: Split, power: float) -> Tensor:
    """Return the exact ``F`` ``(..., n, n)``."""
    s = parts.roots
    F = (s.unsqueeze(-1) + s.unsqueeze(-2)).reciprocal_()
    if power < 0:
        r = s.reciprocal()
        F.mul_(r.unsqueeze(-1)).mul_(-r.unsqueeze(-2))
    if parts.kept is None:
        return F
    f = root_values(parts, power)
    across = _inverse_gaps(parts) * (f.unsqueeze(-1) + f.unsqueeze(-2))  # one of the two is zero
    return torch.where(_both_kept(parts), F, across)


def second_derivative(parts: Split, power: float, G: Tensor, H: Tensor) -> Tensor:
    """Return the derivative of ``<H, F o G>`` with respect to the matrix, all in the eigenbasis.

    With the second divided differences ``f[i,j,k]`` it is ``W + W^T``, ``W_ik = sum_j f[i,j,k] H_ij G_jk``. They
    are products of functions of two indices, so the sums over ``j`` are matrix products:

        three kept:        root  -D_ij D_jk D_ik,  inverse root  (r_i r_j + r_j r_k + r_i r_k) D_ij D_jk D_ik
        i, j kept, k not:  (F_ij - f_j R_jk) R_ik
        i kept, j, k not:  f_i R_ij R_ik

    where ``D_ij = 1 / (s_i + s_j)``, ``r = 1 / s`` and ``R_ij = 1 / |l_i - l_j|`` between kept and dropped.
    """
    s = parts.roots
    D = (s.unsqueeze(-1) + s.unsqueeze(-2)).reciprocal()
    if parts.kept is not None:
        D = D * _both_kept(parts)
    DG, DH = D * G, D * H
    if power > 0:
        W = -D * (DH @ DG)
    else:
        r = s.reciprocal()
        column, row = r.unsqueeze(-1), r.unsqueeze(-2)
        W = D * (column * ((DH * row) @ DG) + ((DH * row) @ DG) * row + column * (DH @ DG) * row)
    if parts.kept is not None:
        f = root_values(parts, power).unsqueeze(-2)
        F = first_differences(parts, power) * _both_kept(parts)
        R = _inverse_gaps(parts)
        crossing = R > 0
        RG, RH = R * G, R * H
        inner = _both_kept(parts)
        W = W + R * ((F * H) @ (crossing * G) - (inner * H * f) @ RG)  # k dropped
        W = W + R * ((crossing * H) @ (F * G) - (RH * f) @ (inner * G))  # i dropped
        W = W + F * (RH @ (crossing * G)) - inner * (RH @ RG) * f  # j dropped
        W = W + f.mT * R * (RH @ G) + (RH * f) @ RG + R * (H @ RG) * f  # only i, only j, only k kept
    return W + W.mT


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
