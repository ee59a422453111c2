"""The square root and the inverse square root of a covariance, and the solvers to choose from."""

import functools
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from orthocond._core.observing import notify
from orthocond._core.overriding import overridable
from orthocond._core.precision import at_least_float32
from orthocond._core.registry import frozen, resolve
from orthocond.errors import ArgumentError, check_nonnegative, check_square
from orthocond.linalg._eigen_solvers import EIGEN_SOLVERS
from orthocond.linalg._functions import (
    INV_SQRT,
    SQRT,
    Chosen,
    SpectralFunction,
    chosen_function,
    clamped,
    is_clamped,
    spectral_function,
)
from orthocond.linalg._gradients import GRADIENTS
from orthocond.linalg._iterative import ITERATIVE_SOLVERS
from orthocond.linalg._products import PRODUCTS_SOLVERS
from orthocond.linalg._solver import Solver

__all__ = [
    "SOLVERS",
    "default_rtol",
    "matrix_inv_sqrth",
    "matrix_sqrth",
    "matrix_sqrth_pair",
    "resolved",
    "spectral",
]


SOLVERS = frozen(*EIGEN_SOLVERS, *ITERATIVE_SOLVERS, *PRODUCTS_SOLVERS)
"""The solvers by name. Write one as ``solver="eigh"`` or ``solver="newton_schulz(iterations=20)"``.

Example:
    >>> list(SOLVERS)
    ['eigh', 'svd', 'newton_schulz', 'pade', 'products']
    >>> SOLVERS["pade"].options["degree"], SOLVERS["pade"].has_eigenvalues
    (5, False)
"""


def matrix_sqrth(
    A: Tensor, *, solver: str = "eigh", gradient: str = "exact", eps: float = 0.0, rtol: float | None = None
) -> Tensor:
    r"""Return the square root of symmetric positive semi-definite matrices.

    .. math:: Q = (A + \epsilon I)^{1/2}

    *Gradient:* :math:`U (F \circ (U^T G U)) U^T` with :math:`F_{ij} = 1 / (s_i + s_j)`,
    :math:`s_i = \sqrt{\lambda_i + \epsilon}`: exact for repeated eigenvalues too, and differentiable again. The root
    has no derivative at a singular matrix; there, null directions get none (see ``rtol``).

    Args:
        A: matrices ``(..., n, n)``, real or complex. Only the symmetric or Hermitian part ``(A + A^H) / 2`` is used.
            Negative eigenvalues are treated as rounding noise: they count down to ``-eps / 2``, or are dropped. If an
            asymmetry or a negative eigenvalue is larger than rounding, a warning is issued, once per process.
        solver: one of `SOLVERS`.
        gradient: one of `GRADIENTS`, for the solvers by eigenvalues.
        eps: added to the eigenvalues; with ``solver="eigh(clamp=true)"`` those below it are raised to it instead.
        rtol: eigenvalues of ``A`` at or below ``rtol`` times the largest are the null space: they map to zero, in
            the gradient too. ``None`` (and 0) drop nothing when ``eps > 0``; when ``eps = 0``, ``None`` means
            ``n * finfo(A.dtype).eps`` (of float32 for the half types), as in `torch.linalg.pinv`, and
            eigenvalues below 2e-308, the smallest normal number of float64, are zero.

    Returns:
        The roots ``(..., n, n)``, symmetric up to rounding, in the dtype and on the device of ``A``. A value too large
        for the dtype becomes its largest finite value.

    Raises:
        ArgumentError: a wrong shape, an unknown choice, a negative ``eps`` or ``rtol``.
        DtypeError: ``A`` is neither floating nor complex.
        NonFiniteError: a matrix holds NaN or infinity.
        SolverError: no decomposition converged, retries included.

    Reference:
        Song, Sebe, Wang 2022, eq. 4; Higham, Functions of Matrices, 2008, theorem 3.11.

    Example:
        >>> matrix_sqrth(torch.tensor([[5.0, 4.0], [4.0, 5.0]]))
        tensor([[2., 1.],
                [1., 2.]])
    """
    return spectral("matrix_sqrth", A, (SQRT,), solver=solver, gradient=gradient, eps=eps, rtol=rtol)[0][0]


def matrix_inv_sqrth(
    A: Tensor, *, solver: str = "eigh", gradient: str = "exact", eps: float = 0.0, rtol: float | None = None
) -> Tensor:
    r"""Return the inverse square root of symmetric positive semi-definite matrices.

    .. math:: S = (A + \epsilon I)^{-1/2}

    and the pseudo-inverse of the root where eigenvalues are dropped. *Gradient:* as in `matrix_sqrth`, with
    :math:`F_{ij} = -1 / (s_i s_j (s_i + s_j))`.

    Args, Returns, Raises: as in `matrix_sqrth`.

    Reference:
        Song, Sebe, Wang 2022, eq. 4.

    Example:
        A covariance of rank 1: its null space maps to zero instead of being amplified.

        >>> matrix_inv_sqrth(torch.tensor([[4.0, 0.0], [0.0, 0.0]]))
        tensor([[0.5000, 0.0000],
                [0.0000, 0.0000]])
    """
    return spectral("matrix_inv_sqrth", A, (INV_SQRT,), solver=solver, gradient=gradient, eps=eps, rtol=rtol)[0][0]


def matrix_sqrth_pair(
    A: Tensor, *, solver: str = "eigh", gradient: str = "exact", eps: float = 0.0, rtol: float | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return the square root and the inverse square root from one decomposition.

    Args, Raises: as in `matrix_sqrth`.

    Returns:
        `matrix_sqrth` and `matrix_inv_sqrth` of ``A``, each ``(..., n, n)``.

    Example:
        >>> Q, S = matrix_sqrth_pair(torch.tensor([[5.0, 4.0], [4.0, 5.0]]))
        >>> torch.allclose(Q @ S, torch.eye(2), atol=1e-6)
        True
    """
    (Q, S), _ = spectral("matrix_sqrth_pair", A, (SQRT, INV_SQRT), solver=solver, gradient=gradient, eps=eps, rtol=rtol)
    return Q, S


@overridable
def spectral(
    caller: str,
    A: Tensor,
    functions: tuple[Chosen | str, ...],
    *,
    solver: str = "eigh",
    gradient: str = "exact",
    eps: float = 0.0,
    rtol: float | None = None,
    floor: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return ``f(A + eps I)`` for each of ``functions``, and the eigenvalues where the solver has them.

    The public functions and the layers share this function. The eigenvalues are detached, in the compute dtype and
    ascending. ``floor`` ``(...)`` is the rounding noise of each matrix, where it is known: eigenvalues at or below it
    are dropped, unless ``eps`` is as large. A solver without eigenvalues sets matrices that are entirely noise to
    zero.
    """
    check_square(A, caller, allow_complex=True)
    entry, options, chosen, rtol = resolved(caller, A, functions, solver, gradient, eps, rtol)
    results, eigenvalues = entry.solve(A, chosen, gradient=gradient, eps=eps, rtol=rtol, floor=floor, **options)
    notify(caller, A, eigenvalues, eps, clamp=is_clamped(chosen[0]))
    return results, eigenvalues


def resolved(
    caller: str,
    A: Tensor,
    functions: tuple[Chosen | str, ...],
    solver: str,
    gradient: str,
    eps: float,
    rtol: float | None,
) -> tuple[Solver, dict[str, Any], tuple[Chosen, ...], float | None]:
    """Return the solver with its options, the functions as data, and ``rtol`` with its default filled in.

    Raises:
        ArgumentError: an unknown choice, a negative ``eps`` or ``rtol``, or options that exclude each other.
    """
    is_repeated = functions[0][0] != "any" and type(eps) is float and type(rtol) in (float, NoneType)
    planned = _planned_once if is_repeated and type(solver) is type(gradient) is str else _planned
    entry, options, chosen, keeps_all = planned(caller, functions, solver, gradient, eps, rtol)
    if entry.has_eigenvalues:
        rtol = (rtol or None) if keeps_all else default_rtol(A, rtol)
    return entry, options, chosen, rtol


def _planned(
    caller: str, functions: tuple[Chosen | str, ...], solver: str, gradient: str, eps: float, rtol: float | None
) -> tuple[Solver, dict[str, Any], tuple[Chosen, ...], bool]:
    """Return the solver with its options, the functions as data, and whether ``rtol=None`` drops no eigenvalue."""
    check_nonnegative(eps, "eps", caller)
    if rtol is not None:
        check_nonnegative(rtol, "rtol", caller)
    entry, options = resolve(SOLVERS, solver, "solver", caller)
    resolve(GRADIENTS, gradient, "gradient", caller)
    chosen = tuple(
        chosen_function(function, "function", caller) if isinstance(function, str) else function
        for function in functions
    )
    function, _ = spectral_function(chosen[0])
    if function.whole_line and gradient != "exact":
        raise ArgumentError(
            f"{caller} got gradient={gradient!r}, a rule for eigenvalues that are not negative; leave gradient='exact'."
        )
    if options.pop("clamp", False) and eps > 0:
        if function.whole_line:
            raise ArgumentError(
                f"{caller} got solver={solver!r}, which raises eigenvalues to eps; a function that takes negative ones "
                "needs none of that. Leave clamp=false."
            )
        chosen = tuple(clamped(each) for each in chosen)
    if not entry.has_eigenvalues:
        _check_without_eigenvalues(caller, entry.name, function, gradient, rtol)
    return entry, options, chosen, function.whole_line or eps > 0


_remembered = functools.lru_cache(maxsize=256)(_planned)


def _planned_once(*choices: Any) -> tuple[Solver, dict[str, Any], tuple[Chosen, ...], bool]:
    """Return the same from a cache: every step of a training run asks for the same plan."""
    return _planned(*choices) if torch.compiler.is_compiling() else _remembered(*choices)


def _check_without_eigenvalues(
    caller: str, solver: str, function: SpectralFunction, gradient: str, rtol: float | None
) -> None:
    if not function.is_root:
        raise ArgumentError(
            f"{caller} got solver={solver!r}, which computes the square root and its inverse alone; use solver='eigh'."
        )
    if rtol:
        raise ArgumentError(
            f"{caller} got rtol={rtol} with solver={solver!r}, which has no eigenvalues to drop; "
            "use solver='eigh', or rtol=None with eps > 0."
        )
    if gradient != "exact":
        raise ArgumentError(
            f"{caller} got gradient={gradient!r} with solver={solver!r}, which has a gradient of its own; "
            "leave gradient='exact', or use solver='eigh'."
        )


def default_rtol(A: Tensor, rtol: float | None) -> float:
    """Return ``rtol``, or where it is None the relative size of rounding noise in ``A``."""
    return A.shape[-1] * torch.finfo(at_least_float32(A.dtype)).eps if rtol is None else rtol
