"""Spectral functions besides the roots: powers, logarithm, exponential, and any function that a user defines."""

import math
from collections.abc import Callable

from torch import Tensor

from orthocond.errors import ArgumentError, check_square
from orthocond.linalg._functions import INV_SQRT, SQRT, Chosen
from orthocond.linalg._roots import spectral

__all__ = ["matrix_exph", "matrix_functionh", "matrix_logh", "matrix_powerh"]

_ROOTS: dict[float, Chosen] = {0.5: SQRT, -0.5: INV_SQRT}


def matrix_powerh(
    A: Tensor,
    exponent: float,
    *,
    solver: str = "eigh",
    gradient: str = "exact",
    eps: float = 0.0,
    rtol: float | None = None,
) -> Tensor:
    r"""Return a real power of symmetric positive semi-definite matrices.

    .. math:: (A + \epsilon I)^p

    Null directions (see ``rtol``) map to zero whatever the exponent, so ``exponent=-1`` is the pseudo-inverse and
    ``exponent=0`` the projector on the range.

    *Gradient:* :math:`U (F \circ (U^H G U)) U^H`, where :math:`F_{ij}` is the divided difference of :math:`x^p`. With
    :math:`t = \log \lambda_i - \log \lambda_j` it is
    :math:`(\lambda_i \lambda_j)^{(p-1)/2} \sinh(pt/2) / \sinh(t/2)`: no cancellation at any gap. Differentiable twice.

    Args:
        A: matrices ``(..., n, n)``, as in `matrix_sqrth`.
        exponent: the power :math:`p`, a number.
        solver: one of `SOLVERS`; those without eigenvalues support only the exponents 0.5 and -0.5.
        gradient: one of `GRADIENTS`.
        eps: added to the eigenvalues; a floor for them with ``solver="eigh(clamp=true)"``.
        rtol: as in `matrix_sqrth`.

    Returns:
        The powers ``(..., n, n)``, in the dtype and on the device of ``A``.

    Raises:
        ArgumentError: ``exponent`` is not a finite number; otherwise as in `matrix_sqrth`.

    Reference:
        Higham, Functions of Matrices, 2008, chapter 7.

    Example:
        >>> import torch
        >>> matrix_powerh(torch.diag(torch.tensor([16.0, 1.0, 0.0])), -0.25)
        tensor([[0.5000, 0.0000, 0.0000],
                [0.0000, 1.0000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    check_square(A, "matrix_powerh", allow_complex=True)
    if not isinstance(exponent, float | int) or not math.isfinite(exponent):
        raise ArgumentError(
            f"matrix_powerh expected a finite number as exponent, got {exponent!r}; pass e.g. exponent=-0.25. It has "
            "no gradient: for one, use matrix_exph(exponent * matrix_logh(A))."
        )
    function = _ROOTS.get(exponent, ("power", (exponent,)))
    (power,), _ = spectral("matrix_powerh", A, (function,), solver=solver, gradient=gradient, eps=eps, rtol=rtol)
    return power


def matrix_logh(
    A: Tensor, *, solver: str = "eigh", gradient: str = "exact", eps: float = 0.0, rtol: float | None = None
) -> Tensor:
    r"""Return the logarithm of symmetric positive semi-definite matrices.

    .. math:: \log(A + \epsilon I)

    Null directions (see ``rtol``) map to zero, as if their eigenvalue were 1: the logarithm on the range of ``A``.

    *Gradient:* with :math:`F_{ij} = (\lambda_i \lambda_j)^{-1/2} (t/2) / \sinh(t/2)`, in the notation of
    `matrix_powerh`; exact at any gap, and differentiable twice.

    Args:
        A: matrices ``(..., n, n)``, as in `matrix_sqrth`.
        solver: one of `SOLVERS` that has eigenvalues.
        gradient: one of `GRADIENTS`.
        eps: added to the eigenvalues; a floor for them with ``solver="eigh(clamp=true)"``.
        rtol: as in `matrix_sqrth`.

    Returns:
        The logarithms ``(..., n, n)``, in the dtype and on the device of ``A``.

    Raises:
        ArgumentError, DtypeError, NonFiniteError, SolverError: as in `matrix_sqrth`.

    Reference:
        Arsigny et al., Log-Euclidean metrics for fast and simple calculus on diffusion tensors, 2006.

    Example:
        >>> import torch
        >>> matrix_logh(torch.diag(torch.tensor([1.0, 4.0, 0.0])))
        tensor([[0.0000, 0.0000, 0.0000],
                [0.0000, 1.3863, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    (logarithm,), _ = spectral("matrix_logh", A, ("log",), solver=solver, gradient=gradient, eps=eps, rtol=rtol)
    return logarithm


def matrix_exph(
    A: Tensor, *, solver: str = "eigh", gradient: str = "exact", eps: float = 0.0, rtol: float | None = None
) -> Tensor:
    r"""Return the exponential of symmetric matrices, positive semi-definite or not.

    .. math:: \exp(A + \epsilon I)

    *Gradient:* with :math:`F_{ij} = e^m (1 - e^{-d}) / d`, where :math:`m` is the larger eigenvalue of the two and
    :math:`d` their distance; exact at any gap, and differentiable twice.

    Args:
        A: matrices ``(..., n, n)``; the symmetric part counts, with eigenvalues of any sign.
        solver: one of `SOLVERS` that has eigenvalues.
        gradient: ``"exact"``; the other rules are for eigenvalues that are not negative.
        eps: added to the eigenvalues, which multiplies the result by :math:`e^\epsilon`.
        rtol: ``None`` (or 0). The exponential of zero is 1, so there is no null space to drop.

    Returns:
        The exponentials ``(..., n, n)``, in the dtype and on the device of ``A``. A value too large for the dtype
        becomes the largest that it can hold, for float64 about 1e250.

    Raises:
        ArgumentError: an ``rtol`` above zero; otherwise as in `matrix_sqrth`.

    Reference:
        Higham, Functions of Matrices, 2008, chapter 10.

    Example:
        >>> import torch
        >>> A = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> torch.allclose(matrix_exph(A), torch.linalg.matrix_exp(A))
        True
        >>> torch.allclose(matrix_logh(matrix_exph(A)), A, atol=1e-6)
        True
    """
    if rtol:
        raise ArgumentError(
            f"matrix_exph got rtol={rtol}, but the exponential has no null space to drop (exp(0) = 1); leave rtol=None."
        )
    (exponential,), _ = spectral("matrix_exph", A, ("exp",), solver=solver, gradient=gradient, eps=eps)
    return exponential


def matrix_functionh(
    A: Tensor,
    function: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    *,
    solver: str = "eigh",
    gradient: str = "exact",
    eps: float = 0.0,
    rtol: float | None = None,
) -> Tensor:
    r"""Return any function of symmetric matrices: the function of the eigenvalues.

    .. math:: f(A + \epsilon I) = U \, \mathrm{diag}(f(\lambda_i + \epsilon)) \, U^H

    *Gradient:* with the divided differences :math:`F_{ij} = (f_i - f_j) / (\lambda_i - \lambda_j)`, or where
    eigenvalues are close the mean of :math:`f'` between them by Gauss quadrature, whichever has the smaller error
    bound for the pair. Exact at repeated eigenvalues, and differentiable again if autograd can differentiate
    ``derivative``.

    Args:
        A: matrices ``(..., n, n)``; the symmetric part counts, with eigenvalues of any sign.
        function: from a float64 tensor of eigenvalues, of any shape, to values of that shape, element by element.
        derivative: its derivative, likewise; it is also evaluated between the eigenvalues.
        solver: one of `SOLVERS` that has eigenvalues.
        gradient: ``"exact"``; the other rules are for eigenvalues that are not negative.
        eps: added to the eigenvalues.
        rtol: eigenvalues at or below ``rtol`` times the largest map to zero, for a function that is undefined there.
            ``None`` drops nothing, whatever ``eps`` is.

    Returns:
        The matrices ``(..., n, n)``, in the dtype and on the device of ``A``.

    Raises:
        ArgumentError: ``function`` or ``derivative`` can't be called or changes the shape; ``function`` is not finite
            at an eigenvalue; otherwise as in `matrix_sqrth`.
        GradientError: a second derivative, where autograd can't differentiate ``derivative``.

    Reference:
        Higham, Functions of Matrices, 2008, theorem 3.11.

    Example:
        >>> import torch
        >>> A = torch.tensor([[0.0, 1.0], [1.0, 0.0]], requires_grad=True)
        >>> T = matrix_functionh(A, torch.tanh, lambda x: 1 - torch.tanh(x) ** 2)
        >>> torch.allclose(T, torch.tanh(A), atol=1e-6)  # for this matrix the same as entry by entry
        True
    """
    check_square(A, "matrix_functionh", allow_complex=True)
    for name, each in (("function", function), ("derivative", derivative)):
        if not callable(each):
            raise ArgumentError(f"matrix_functionh expected {name} to be callable, got {each!r}; pass e.g. torch.tanh.")
    chosen: Chosen = ("any", (function, derivative))
    (value,), _ = spectral("matrix_functionh", A, (chosen,), solver=solver, gradient=gradient, eps=eps, rtol=rtol)
    return value
