"""Projectors on invariant subspaces, and single eigenvectors, of symmetric matrices."""

from typing import SupportsIndex

import torch
from torch import Tensor

from orthocond._core.overriding import overridable
from orthocond._core.precision import at_least_float32, autocast_off, lift, narrow, widen
from orthocond.errors import ArgumentError, check_square
from orthocond.linalg._eigen import symmetric
from orthocond.linalg._factor import sign_factor
from orthocond.linalg._polar import power_of_two_scale

__all__ = ["spectral_projector", "top_eigenvector"]


@overridable
def spectral_projector(A: Tensor, k: int, *, largest: bool = True) -> Tensor:
    r"""Return the orthogonal projector on the span of ``k`` eigenvectors of symmetric matrices.

    .. math:: \Pi = \sum_{i=1}^{k} u_i u_i^T

    over the ``k`` largest (or smallest) eigenvalues. A loss that depends on a subspace, but not on its basis, is a
    function of the projector.

    *Gradient:* :math:`U (K \circ (U^T G U)) U^T` with :math:`K_{ij} = 1 / |\lambda_i - \lambda_j|` between an
    eigenvalue inside and one outside, 0 elsewhere: exact while the gap at the edge is open, whatever ties there are on
    either side of it, and differentiable again, any number of times. Pairs across the edge that are not farther apart
    than :math:`n\,u\,\max|\lambda|` (``u`` is the unit roundoff of the dtype of ``A``) get no gradient; there the
    projector is not unique.

    Args:
        A: matrices ``(..., n, n)``. Only the symmetric part ``(A + A^T) / 2`` is used.
        k: the number of eigenvectors, from 0 to ``n``.
        largest: whether to take those of the largest eigenvalues or of the smallest.

    Returns:
        The projectors ``(..., n, n)``, in the dtype and on the device of ``A``.

    Raises:
        ArgumentError: a wrong shape, or ``k`` out of range.
        DtypeError: ``A`` is not real and floating.
        NonFiniteError: a matrix holds NaN or infinity.
        SolverError: no decomposition converged, retries included.

    Reference:
        Kato, Perturbation Theory for Linear Operators, 1966, section II.2.

    Example:
        The two largest eigenvalues are equal, so their eigenvectors are arbitrary, but the projector is unique:

        >>> spectral_projector(torch.diag(torch.tensor([2.0, 1.0, 2.0])), 2)
        tensor([[1., 0., 0.],
                [0., 0., 0.],
                [0., 0., 1.]])
    """
    check_square(A, "spectral_projector")
    n = A.shape[-1]
    if not isinstance(k, SupportsIndex) or not 0 <= k <= n:
        raise ArgumentError(f"spectral_projector expected an integer 0 <= k <= {n} for {n}x{n} matrices, got k={k}.")
    if k in (0, n) or not A.numel():  # nothing that could turn
        return torch.zeros_like(A) + (k > 0) * torch.eye(n, dtype=A.dtype, device=A.device)
    with autocast_off(A.device):
        wide = symmetric(widen(lift(A, power_of_two_scale(A))))
        sign = sign_factor(wide, k if largest else n - k, n * torch.finfo(at_least_float32(A.dtype)).eps).R
        identity = torch.eye(n, dtype=sign.dtype, device=sign.device)
        return narrow((identity + sign) / 2 if largest else (identity - sign) / 2, A)


@overridable
def top_eigenvector(A: Tensor, *, largest: bool = True) -> Tensor:
    r"""Return the eigenvector of the largest (or smallest) eigenvalue of symmetric matrices, with a fixed sign.

    Its component of largest magnitude is positive (the first of them at a tie). This makes it a function of the
    matrix, because the sign that a solver returns is arbitrary.

    *Gradient:* :math:`\sum_{j} u_j u_j^T \, dA \, u / (\lambda - \lambda_j)` over the other eigenvectors: exact
    while the eigenvalue itself is simple, whatever ties there are among the others, and differentiable again. It is
    that of a column of `spectral_projector`, normalised, and bounded where the eigenvalue is not simple.

    Args:
        A: matrices ``(..., n, n)``. Only the symmetric part ``(A + A^T) / 2`` is used.
        largest: whether to take the largest eigenvalue or the smallest.

    Returns:
        Unit vectors ``(..., n)``, in the dtype and on the device of ``A``.

    Raises:
        ArgumentError: a wrong shape, or a matrix of 0x0; otherwise as in `spectral_projector`.

    Example:
        The smallest eigenvector of ``X^T X`` is the direction in which the rows of ``X`` vary the least:

        >>> X = torch.tensor([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]])
        >>> top_eigenvector(X.T @ X, largest=False)
        tensor([0.7071, 0.7071])
    """
    check_square(A, "top_eigenvector")
    if not A.shape[-1]:
        raise ArgumentError("top_eigenvector expected matrices of at least 1x1, got 0x0.")
    with autocast_off(A.device):
        wide = widen(lift(A, power_of_two_scale(A)) if A.numel() else A)
        projector = spectral_projector(wide, 1, largest=largest)
        # Its columns are u_m u, of squared length u_m^2: the longest is the most accurate.
        index = projector.detach().square().sum(-2).argmax(-1)
        column = projector.gather(-1, index[..., None, None].expand(*index.shape, A.shape[-1], 1)).squeeze(-1)
        return narrow(column / torch.linalg.vector_norm(column, dim=-1, keepdim=True), A)
