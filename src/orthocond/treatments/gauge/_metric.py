"""The gradient at the weight that a change of gauge leads to, and how a step of that weight is measured.

All of it is about ``M = W S^(1/2)``, with the covariance ``S`` of the layer's input, of which whitening gives the polar
factor: see docs/gauge.md. ``S`` itself is never formed, only ``W S``, which is what a backward pass of the layer gives.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orthocond._core import private
from orthocond._core.distributed import summed
from orthocond._core.precision import at_least_float32, autocast_off
from orthocond.graph import channel_dim
from orthocond.linalg._decompose import decompose
from orthocond.linalg._eigen import symmetric

__all__ = ["Metric", "cross_covariance", "gradient_after", "metric_of"]


def cross_covariance(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sync: bool = False, process_group: Any = None
) -> Tensor:
    """Return the covariance ``W S`` of the outputs of a layer with its inputs, in the shape of the weight.

    The inputs of a convolution are its patches. With centred outputs, the sum of the outer products of outputs and
    inputs is what the layer's backward pass computes for the weight.

    Args:
        layer: linear, or a convolution of any kind.
        args: what it was called with.
        kwargs: the same, by name.
        sync: take it over all processes of the group.
        process_group: these.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> layer = nn.Linear(2, 1)
        >>> found = cross_covariance(layer, (x,), {})
        >>> bool((found == layer.weight * torch.tensor([1.0, 0.0])).all())
        True
    """
    weight: Any = layer.weight
    weight = weight.detach().to(at_least_float32(weight.dtype)).requires_grad_()
    args, kwargs = private.tree_map_only(Tensor, lambda x: x.to(weight.dtype), (args, kwargs))
    plain = copy.copy(layer)
    plain._parameters = {"weight": weight, "bias": None}
    with torch.enable_grad(), autocast_off(weight.device):
        y = type(layer).forward(plain, *args, **kwargs)  # not a call: that would run the hooks of the layer
    channels = channel_dim(layer, y)
    others = [dim for dim in range(y.ndim) if dim != channels]
    outputs = y.detach()
    total = outputs.sum(others, keepdim=True)
    count = outputs.new_full((1,), outputs.numel() // outputs.shape[channels])
    if sync:
        total, count = summed([total, count], process_group)
    (found,) = torch.autograd.grad(y, weight, (outputs - total / count) / count)
    return summed([found], process_group)[0] if sync else found


def gradient_after(
    G: Tensor, W: Tensor, WS: Tensor, l: Tensor, Q: Tensor, kept: Tensor, c: Tensor, *, rtol: float
) -> Tensor:
    r"""Return the gradient at ``T W`` of what has the gradient ``G`` at ``W``, if it goes through whitening.

    With the singular value decomposition :math:`M = Q \operatorname{diag}(s) R^T`, a gradient is
    :math:`G = (Q X R^T + E) S^{1/2}`, where the rows of :math:`E` leave those of ``M``. The derivative of the polar
    factor divides the antisymmetric part of a change by :math:`s_i + s_j`, and what leads out of the rows or columns by
    :math:`s_i`; after the change of gauge all of them are ``c``. So an entry of ``X`` gets the factor
    :math:`(s_i + s_j) / 2c`, and one with a direction that is not there, or dropped, and the rows of :math:`E` get
    :math:`s_i / c`. A dropped direction has a singular value :math:`d` of its own, which couples an entry to its mirror
    image, with the gaps of `orthocond.linalg._differences`.

    Args:
        G: gradients ``(groups, c, k)``.
        W: the weights before.
        WS: their `cross_covariance`.
        l: the eigenvalues of the covariances ``(groups, c)``.
        Q: their eigenvectors ``(groups, c, c)``.
        kept: which of them the whitening keeps ``(groups, c)``.
        c: ``(groups,)``: the singular values after; zero for a group that stays as it is.
        rtol: the others are at or below ``rtol`` times the largest.
    """
    s = l.clamp(min=0).sqrt()
    largest = s.amax(-1, keepdim=True)
    seen = s.square() > l.shape[-1] * torch.finfo(l.dtype).eps * largest.square()
    inverse = torch.where(seen, s, torch.inf).reciprocal().unsqueeze(-2)
    rows = Q.mT @ G
    X = rows @ W.mT @ Q * inverse
    basis = inverse.mT * (Q.mT @ WS)  # R^T S^(1/2)
    outside = rows - X @ basis

    after = torch.where(c > 0, c, 1.0)[..., None, None]
    s_i, s_j = s.unsqueeze(-1), s.unsqueeze(-2)
    strong, weak = torch.maximum(s_i, s_j), torch.minimum(s_i, s_j)
    both = kept.unsqueeze(-1) & kept.unsqueeze(-2)
    one = kept.unsqueeze(-1) ^ kept.unsqueeze(-2)
    gap = (strong.square() - weak.square()).maximum(rtol * largest.square().unsqueeze(-1))
    of_row = torch.where(kept.unsqueeze(-1), strong, (gap + weak.square()) / torch.where(one, strong, 1.0))
    F = of_row * X - weak * X.mT
    d = after * weak / torch.where(largest > 0, largest, 1.0).unsqueeze(-1)
    across = (after * F + d * F.mT) / torch.where(one, after.square() - d.square(), 1.0)
    X = torch.where(both, X * (s_i + s_j) / (2 * after), torch.where(one, across, X))
    outside = torch.where(kept.unsqueeze(-1), s_i / after, 1.0) * outside
    return torch.where(c[..., None, None] > 0, Q @ (X @ basis + outside), G)


class Metric(NamedTuple):
    """The root of a metric on rows: a factor, and another one for each of some directions."""

    directions: Tensor
    """``(groups, k, n)``, orthonormal."""
    stretch: Tensor
    """``(groups, n)``: their factors."""
    beside: Tensor
    """``(groups,)``: the factor of everything else."""

    @classmethod
    def plain(cls, W: Tensor) -> "Metric":
        """Return the one that changes nothing, for weights ``(groups, c, k)``."""
        groups, rows, columns = W.shape
        n = min(2 * rows, columns)
        return cls(W.new_zeros(groups, columns, n), W.new_ones(groups, n), W.new_ones(groups))

    def where(self, mask: Tensor, other: "Metric") -> "Metric":
        """Return this one for the groups in the mask ``(groups,)``, and the other for the rest."""
        pairs = zip(self, other, strict=True)
        return Metric(*(torch.where(mask.view(-1, *[1] * (own.ndim - 1)), own, its) for own, its in pairs))

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows ``(groups, c, k)`` times the root, in their precision, but float32 at least."""
        rows = rows.to(at_least_float32(rows.dtype))
        directions, stretch, beside = (part.to(rows) for part in self)
        more = (rows @ directions) * (stretch - beside.unsqueeze(-1)).unsqueeze(-2)
        return rows * beside[:, None, None] + more @ directions.mT

    def squared(self) -> "Metric":
        """Return the metric itself, not its root."""
        return Metric(self.directions, self.stretch.square(), self.beside.square())

    def inverse(self) -> "Metric":
        """Return the one that undoes it."""
        return Metric(self.directions, self.stretch.reciprocal(), self.beside.reciprocal())


def metric_of(W: Tensor, WS: Tensor, c: Tensor, rows: Tensor, beside: Tensor) -> Metric:
    r"""Return the root of the metric in which steps turn the polar factor equally fast in all directions of its rows.

    .. math:: B = \frac{\kappa}{c^2} W^T W + \beta (I - \Pi) (I - \Pi)^T, \quad \Pi = \frac{1}{c^2} W^T W S

    For a weight with the covariance :math:`c^2 I`, the polar factor of ``M`` is :math:`M / c`, and
    :math:`W^T W = S^{-1/2} M^T M S^{-1/2}`: so the first term is :math:`\kappa S^{-1}` on the rows of ``M``. The
    projection takes from a gradient what turns the polar factor within its rows; the second term is what the plain
    metric does to the rest, without an effect on the rows.

    Args:
        W: weights ``(groups, c, k)`` with the covariance :math:`c^2 I` on its support, nothing beside that.
        WS: their `cross_covariance`.
        c: ``(groups,)``.
        rows: :math:`\kappa`, ``(groups,)``.
        beside: :math:`\beta`, ``(groups,)``.
    """
    W, WS = (part / c[..., None, None] for part in (W, WS))
    both = torch.cat([part / torch.linalg.matrix_norm(part, keepdim=True).clamp(min=1e-300) for part in (W, WS)], -2)
    Z = torch.linalg.qr(both.mT).Q
    a, b = W @ Z, WS @ Z
    outside = torch.eye(Z.shape[-1], dtype=Z.dtype, device=Z.device) - a.mT @ b
    B = rows[..., None, None] * (a.mT @ a) + beside[..., None, None] * (outside @ outside.mT)
    squares, vectors = decompose(symmetric(B), "eigh")
    return Metric(Z @ vectors, squares.clamp(min=0).sqrt(), beside.sqrt())
