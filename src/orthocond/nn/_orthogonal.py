"""Orthogonal weights: by parametrization, by loss, and a test for orthogonality."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from orthocond._core import private
from orthocond._core.applying import is_plain
from orthocond._core.layout import Layout
from orthocond._core.precision import autocast_off, lift, narrow
from orthocond.errors import ArgumentError, check_choice, check_matrix
from orthocond.nn._exponential import exponential
from orthocond.nn._skew import SkewOrthogonalConv2d

__all__ = ["KINDS", "OrthogonalKernel", "is_orthogonal", "orthogonal_loss", "orthogonal_weight"]

KINDS = ("kernel", "operator")
"""What `orthogonal_weight` can make orthogonal: the flattened kernel, or the map of images.

Example:
    >>> KINDS
    ('kernel', 'operator')
"""


def orthogonal_weight(
    module: nn.Module,
    name: str = "weight",
    *,
    kind: str = "kernel",
    normalize: bool = True,
    tolerance: float | None = None,
) -> nn.Module:
    r"""Make the weight of a layer orthogonal, and keep it orthogonal during training.

    ``kind="kernel"`` puts a parametrization on the flattened kernel ``(out, in * k)``: with the tensor :math:`W` that
    is trained,

    .. math:: \exp(W - W^T)

    has orthonormal columns (rows if it is wide; a rectangular :math:`W` is extended by zero columns to a square
    matrix). It is a `torch.nn.utils.parametrize` parametrization, so ``parametrize.cached()`` and
    ``parametrize.remove_parametrizations`` work on it. A weight that is already orthogonal is kept; any other becomes
    the :math:`W` of the formula.

    ``kind="operator"`` makes the convolution orthogonal as a map of images, so that it preserves their norm. It
    computes the exponential of a skew-symmetric convolution by its series. It works for ``nn.Conv2d`` with "same"
    padding (stride 2 becomes a rearrangement of pixels into channels) and changes the shape of the layer's weight.

    Call it before you create the optimizer: the trained tensor is a new parameter.

    Args:
        module: a linear layer or a convolution, changed in place.
        name: the name of the weight.
        kind: ``"kernel"`` or ``"operator"``.
        normalize: bound the exponent: :math:`W - W^T` is scaled down to a root mean square singular value of 1 where it
            is larger, so that a step turns the weight by a small angle however large :math:`W` has become. ``False``
            is the paper's formula, which does not train well with ``nog``.
        tolerance: truncation error of the operator's series, as a fraction of the input's norm; None for 3e-8. A
            larger one takes fewer convolutions: 4 instead of 8 for a normalised kernel with 1e-3. (The six terms of
            the Taylor series with which such layers are usually trained have an error of up to 1.4e-3.)

    Returns:
        The same module.

    Raises:
        ArgumentError: there is no such weight, it is not a matrix, the kind is unknown, the convolution can't be an
            operator, or there is a tolerance without a series.

    Reference:
        Song, Sebe, Wang 2022, eq. 13; Singla and Feizi, Skew orthogonal convolutions, ICML 2021.

    Example:
        >>> conv = orthogonal_weight(nn.Conv2d(3, 64, 3))
        >>> is_orthogonal(conv.weight)
        True
    """
    check_choice(kind, KINDS, "kind", "orthogonal_weight")
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise ArgumentError(
            f"orthogonal_weight found no tensor {name!r} in {type(module).__name__}; "
            "pass a linear layer or a convolution."
        )
    check_matrix(weight, "orthogonal_weight")
    if isinstance(module, SkewOrthogonalConv2d):
        raise ArgumentError("orthogonal_weight found an orthogonal operator already; it needs nothing more.")
    if parametrize.is_parametrized(module, name):
        raise ArgumentError(
            f"orthogonal_weight found a parametrization on {name!r} already; remove it first, with "
            "torch.nn.utils.parametrize.remove_parametrizations."
        )
    if kind == "operator":
        return SkewOrthogonalConv2d.take_over(module, name, normalize=normalize, tolerance=tolerance)
    if tolerance is not None:
        raise ArgumentError("tolerance belongs to the series of kind='operator'; kind='kernel' is exact, leave it out.")
    kernel = OrthogonalKernel(weight, Layout.of(module), normalize=normalize)
    return parametrize.register_parametrization(module, name, kernel)


class OrthogonalKernel(nn.Module):
    """The parametrization ``W -> exp(W - W^T)`` of a flattened kernel, turned so that it starts where it should."""

    base: Tensor
    tau: Tensor
    signs: Tensor
    _last: tuple[bool, tuple[Tensor, ...], Tensor] | None = None
    """``normalize``, the tensors and the weight made of them."""

    def __init__(self, weight: Tensor, layout: Layout, *, normalize: bool) -> None:
        super().__init__()
        self.normalize = normalize
        self.layout = layout
        frame = _tall(layout.matrix(weight.detach()))
        # Householder reflectors of the orthogonal matrix in front of the exponential: none, that is the identity.
        self.register_buffer("base", torch.zeros_like(frame, memory_format=torch.contiguous_format))
        self.register_buffer("tau", torch.zeros_like(frame[..., 0, :]))
        self.register_buffer("signs", torch.ones_like(frame[..., 0, :]))

    def forward(self, W: Tensor) -> Tensor:
        """Return the orthogonal weight; in eval without gradients, the last one while nothing has changed."""
        if self.training and self._last is not None:
            self._last = None
        if self.training or torch.is_grad_enabled() or not _is_ordinary(W):
            return self._weight(W)
        parts, last = (W, self.base, self.tau, self.signs), self._last
        # By value: writing to `.data`, as some averages of weights do, leaves no other trace.
        if last is None or last[0] != self.normalize or not all(map(_is_same, parts, last[1])):
            self._last = last = self.normalize, tuple(part.detach().clone() for part in parts), self._weight(W)
        return last[2].clone()

    def _weight(self, W: Tensor) -> Tensor:
        with autocast_off(W.device):
            matrix = lift(self.layout.matrix(W))
            frame = _exponential_frame(_bounded(_tall(matrix)) if self.normalize else _tall(matrix))
            base = self.base.to(frame)
            # Each tau follows from its reflector; the stored one was rounded on its own when the dtype changed.
            tau = torch.where(self.tau != 0, 2 / (1 + base.tril(-1).square().sum(-2)), 0.0).to(frame)
            frame = torch.ormqr(base, tau, frame) * self.signs.to(frame).unsqueeze(-2)
            frame = frame if matrix.shape[-2] >= matrix.shape[-1] else frame.mT
            return narrow(self.layout.kernel(frame, W), W)

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the tensor to train: zero, and the base set, for an orthogonal weight; the weight itself otherwise."""
        matrix = self.layout.matrix(weight)
        frame = _tall(lift(matrix))
        if frame.is_meta or not _is_frame(frame, _rounding(frame, weight.dtype)):
            self.base.zero_()
            self.tau.zero_()
            self.signs.fill_(1)
            return weight
        base, tau = torch.geqrf(frame)
        self.base.copy_(base)
        self.tau.copy_(tau)
        self.signs.copy_(base.diagonal(dim1=-2, dim2=-1).sign())
        return torch.zeros_like(weight)


def orthogonal_loss(weight: Tensor) -> Tensor:
    r"""Return how far the rows of the flattened kernel ``(out, in * k)`` are from orthonormal.

    .. math:: \| W W^T - I \|_F

    *Gradient:* :math:`2 (W W^T - I) W / \|W W^T - I\|_F`, and zero at an orthogonal weight. A tall kernel can't have
    orthonormal rows; its loss is smallest, ``sqrt(out - in * k)``, where the columns are orthonormal.

    Args:
        weight: ``(out, in)`` or ``(out, in, *k)``.

    Returns:
        A scalar.

    Reference:
        Song, Sebe, Wang 2022, eq. 12.

    Example:
        >>> orthogonal_loss(torch.eye(3)).item()
        0.0
    """
    check_matrix(weight, "orthogonal_loss")
    with autocast_off(weight.device):
        W = lift(weight.flatten(1))
        identity = torch.eye(len(W), dtype=W.dtype, device=W.device)
        loss: Tensor = torch.linalg.vector_norm(W @ W.mT - identity)
        return loss.to(weight.dtype)


def is_orthogonal(weight: Tensor, *, atol: float | None = None) -> bool:
    """Return whether the rows or columns (whichever are fewer) of a kernel ``(out, in * k)`` are orthonormal.

    The weight of a grouped or transposed convolution represents other matrices: pass each of them separately.

    Args:
        weight: ``(out, in)`` or ``(out, in, *k)``.
        atol: tolerance for each inner product; ``None`` for ten times the rounding error of a sum of that length.

    Example:
        >>> is_orthogonal(torch.eye(3, 5)), is_orthogonal(torch.ones(3, 5))
        (True, False)
    """
    check_matrix(weight, "is_orthogonal")
    return _is_frame(
        _tall(lift(weight.detach().flatten(1))),
        atol if atol is not None else _rounding(weight.flatten(1), weight.dtype),
    )


def _is_ordinary(W: Tensor) -> bool:
    """Return whether values are all there is to a tensor: no tangent, and nothing records what is done to it."""
    if not is_plain() or type(W) not in (Tensor, nn.Parameter) or W.is_meta:
        return False
    return not private.num_dispatch_modes() and not private.forward_mode_is_on()


def _is_same(found: Tensor, known: Tensor) -> bool:
    return found.dtype == known.dtype and found.device == known.device and torch.equal(found, known)


def _rounding(matrix: Tensor, dtype: torch.dtype) -> float:
    return float(10 * max(matrix.shape[-2:]) ** 0.5 * torch.finfo(dtype).eps)


def _is_frame(frame: Tensor, atol: float) -> bool:
    gram = frame.mT @ frame
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return bool(((gram - identity).abs() <= atol).all())


def _tall(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT


def _bounded(W: Tensor) -> Tensor:
    """Return ``W`` ``(..., n, k)``, scaled down where the singular values of ``[W 0] - [W 0]^T`` have an rms above 1.

    They are ``min(n, 2k)`` in number, and the sum of their squares is ``2 |W|^2 - 2 <W1, W1^T>``.
    """
    n, k = W.shape[-2:]
    top = W[..., :k, :]
    squares = 2 * (W.square().sum((-2, -1), keepdim=True) - (top * top.mT).sum((-2, -1), keepdim=True))
    return W / (squares / min(n, 2 * k)).clamp(min=1.0).sqrt()


def _exponential_frame(W: Tensor) -> Tensor:
    """Return the first ``k`` columns of ``exp(A)``, ``A = [W 0] - [W 0]^T``, for ``W`` ``(..., n, k)``, ``n >= k``.

    With ``W = [W1; W2]``, ``A`` maps ``[a; W2 b]`` to ``[(W1 - W1^T) a - W2^T W2 b; W2 a]``, so for ``n > 2k`` the
    columns are found from the exponential of a matrix of size ``2k``. A factor ``c`` between its halves balances it.
    """
    n, k = W.shape[-2:]
    if n <= 2 * k:
        square = nn.functional.pad(W, (0, n - k))
        return exponential(square - square.mT)[..., :k]
    W1, W2 = W[..., :k, :], W[..., k:, :]
    C = W2.mT @ W2
    c = torch.linalg.matrix_norm(C.detach(), keepdim=True).sqrt().clamp(min=torch.finfo(W.dtype).tiny ** 0.5)
    identity = torch.eye(k, dtype=W.dtype, device=W.device).expand_as(C)
    top = torch.cat([W1 - W1.mT, -C / c], -1)
    bottom = torch.cat([c * identity, torch.zeros_like(C)], -1)
    columns = exponential(torch.cat([top, bottom], -2))[..., :k]
    return torch.cat([columns[..., :k, :], W2 @ (columns[..., k:, :] / c)], -2)
