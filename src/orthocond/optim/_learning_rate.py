"""The learning rate after which the weight is as near to orthogonal as it can get."""

import math

import torch
from torch import Tensor

from orthocond._core.layout import Layout
from orthocond._core.precision import widen
from orthocond.errors import ArgumentError, NonFiniteError, check_choice, check_matrix, check_nonnegative

__all__ = ["RULES", "optimal_learning_rate"]

RULES = ("paper", "exact")
"""The rules of `optimal_learning_rate`: the paper's approximation, or the minimum of the objective itself.

Example:
    >>> RULES
    ('paper', 'exact')
"""


def optimal_learning_rate(
    weight: Tensor,
    gradient: Tensor,
    *,
    rule: str = "paper",
    max_lr: float | None = None,
    groups: int = 1,
    transposed: bool = False,
) -> float:
    r"""Return the learning rate that brings ``weight - lr * gradient`` nearest to an orthogonal matrix.

    .. math:: \min_\eta \| (W - \eta G)(W - \eta G)^T - I \|_F

    ``rule="paper"`` is the paper's approximation with the vectors :math:`w` and :math:`l` of both,

    .. math:: \eta^* = \frac{w^T w \; l^T w}{w^T w \; l^T l + 2 (l^T w)^2}

    which is negative where the gradient points away from the weight. ``rule="exact"`` minimises the objective itself:
    its square is a quartic in :math:`\eta` with five inner products for coefficients, and its minimum over
    ``[0, max_lr]`` is at an end or at a root of a cubic, in closed form.

    Args:
        weight: flattened to ``(out, in * k)``.
        gradient: of the same shape.
        rule: ``"paper"`` or ``"exact"``.
        max_lr: the largest rate to return; ``None`` for no limit.
        groups: of a grouped convolution: each group is a matrix of its own, and the objective is the sum over them.
        transposed: whether the weight belongs to a transposed convolution ``(in, out, *k)``.

    Returns:
        The learning rate, 0 for a zero gradient.

    Raises:
        ArgumentError: shapes that differ, an unknown rule, a negative ``max_lr``.
        NonFiniteError: weight or gradient hold NaN or infinity.

    Reference:
        Song, Sebe, Wang 2022, eqs. 18 to 20.

    Example:
        >>> round(optimal_learning_rate(2 * torch.eye(3), torch.eye(3), rule="exact", max_lr=2.0), 6)
        1.0
    """
    check_choice(rule, RULES, "rule", "optimal_learning_rate")
    check_matrix(weight, "optimal_learning_rate")
    if weight.shape != gradient.shape:
        raise ArgumentError(
            "optimal_learning_rate expected weight and gradient of one shape, got "
            f"{tuple(weight.shape)} and {tuple(gradient.shape)}; pass the gradient of this weight."
        )
    if max_lr is not None:
        check_nonnegative(max_lr, "max_lr", "optimal_learning_rate")
    limit = math.inf if max_lr is None else float(max_lr)
    layout = Layout(groups, transposed)
    return _rate(layout.matrix(weight), layout.matrix(gradient), rule, limit)


def _rate(weight: Tensor, gradient: Tensor, rule: str, limit: float) -> float:
    """Return the same for matrices ``(..., m, n)``: the objective is the sum over those of a batch."""
    W, G = widen(weight.detach()), widen(gradient.detach())
    size = float(torch.linalg.vector_norm(G))
    if not math.isfinite(size) or not math.isfinite(float(torch.linalg.vector_norm(W))):
        raise NonFiniteError(
            "the optimal learning rate met NaN or infinity in weight or gradient; look for the overflow."
        )
    if size == 0:
        return 0.0
    # For a gradient of norm 1 nothing over- or underflows on the way.
    if rule == "exact":
        return min(_exact(W, G / size, limit * size) / size, limit)
    return min(_paper(W, G / size) / size, limit)


def _paper(W: Tensor, G: Tensor) -> float:
    ww, wg, gg = torch.stack([(W * W).sum(), (W * G).sum(), (G * G).sum()]).tolist()
    return float(ww * wg / (ww * gg + 2 * wg * wg)) if ww > 0 else 0.0


def _exact(W: Tensor, G: Tensor, limit: float) -> float:
    if W.shape[-2] > W.shape[-1]:  # the other Gram matrix differs by a constant alone
        W, G = W.mT, G.mT
    A = W @ W.mT - torch.eye(W.shape[-2], dtype=W.dtype, device=W.device)
    B = W @ G.mT
    B = B + B.mT
    C = G @ G.mT
    products = ((A * A).sum(), (A * B).sum(), (B * B).sum() + 2 * (A * C).sum(), (B * C).sum(), (C * C).sum())
    aa, ab, quadratic, bc, cc = torch.stack(products).tolist()
    candidates = [0.0, *(root for root in _cubic_roots(4 * cc, -6 * bc, 2 * quadratic, -2 * ab) if 0 < root < limit)]
    if limit < math.inf:
        candidates.append(limit)
    return min(candidates, key=lambda x: aa + x * (-2 * ab + x * (quadratic + x * (-2 * bc + x * cc))))


def _cubic_roots(a: float, b: float, c: float, d: float) -> list[float]:
    """Return the real roots of ``a x^3 + b x^2 + c x + d``, polished by a Newton step each.

    Cardano's formula, and Viete's where there are three.
    """
    shift = b / (3 * a)
    p = (3 * a * c - b * b) / (3 * a * a)
    q = (2 * b**3 - 9 * a * b * c + 27 * a * a * d) / (27 * a**3)
    half, third = q / 2, p / 3
    discriminant = half * half + third**3
    if discriminant > 0:
        big = -math.copysign(math.cbrt(abs(half) + math.sqrt(discriminant)), half)
        roots = [big - (third / big if big else 0.0)]
    elif third == 0:
        roots = [0.0]
    else:
        radius = 2 * math.sqrt(-third)
        angle = math.acos(max(-1.0, min(1.0, -half / math.sqrt((-third) ** 3))))
        roots = [radius * math.cos((angle - 2 * math.pi * k) / 3) for k in range(3)]
    return [_polished(root - shift, a, b, c, d) for root in roots]


def _polished(x: float, a: float, b: float, c: float, d: float) -> float:
    slope = c + x * (2 * b + x * 3 * a)
    return x - (d + x * (c + x * (b + x * a))) / slope if slope else x
