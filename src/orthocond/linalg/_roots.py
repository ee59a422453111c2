"""The square root and the inverse square root of a covariance, and the solvers to choose from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from orthocond._core.overriding import overridable
from orthocond._core.precision import at_least_float32
from orthocond._core.registry import Entry, frozen, resolve
from orthocond.errors import ArgumentError, check_nonnegative, check_square
from orthocond.linalg._eigen import eigen_roots
from orthocond.linalg._gradients import GRADIENTS
from orthocond.linalg._iterative import PAIRS, iterative_roots

__all__ = [
    "SOLVERS",
    "Solver",
    "default_rtol",
    "matrix_inv_sqrth",
    "matrix_sqrth",
    "matrix_sqrth_pair",
    "roots",
]


@dataclass(frozen=True)
class Solver(Entry):
    """A way to the roots of a symmetric positive semi-definite matrix."""

    @property
    def has_eigenvalues(self) -> bool:
        """Whether the solver knows the eigenvalues, and so the rank and the gradient rules."""
        return self.name not in PAIRS


SOLVERS = frozen(
    Solver(
        "eigh",
        "Symmetric eigendecomposition, in float64 inside where the device has it: the most accurate and the default.",
        "LAPACK syevd; gradient by Daleckii and Krein",
    ),
    Solver(
        "svd",
        "Singular value decomposition, in float64 inside where the device has it: as accurate as eigh, twice its time.",
        "LAPACK gesdd; the paper's solver",
    ),
    Solver(
        "newton_schulz",
        "Coupled Newton-Schulz iteration in the input's precision. Converges while the norm over the smallest "
        "eigenvalue is below about 2.25^iterations / 30; more iterations amplify the rounding noise of a singular "
        "float32 matrix (2.25^15 * 6e-8 = 0.01).",
        "Higham, Functions of Matrices, 2008, eq. 6.35; Li et al., CVPR 2018; the paper's baseline",
        {"iterations": 15},
    ),
    Solver(
        "pade",
        "Diagonal Pade approximant of sqrt(1 - z). For x = eigenvalue/norm the relative error of the root is "
        "2t/(1 - t), t = ((1 - sqrt x)/(1 + sqrt x))^(2 degree + 1): with degree 5 it is 2e-3 at x = 0.1, but 8 at "
        "x = 1e-4. The iterations are those of the gradient.",
        "Song, Sebe, Wang, Fast differentiable matrix square root, ICLR 2022",
        {"degree": 5, "iterations": 15},
    ),
)
"""The solvers by name. Write one as ``solver="eigh"`` or ``solver="newton_schulz(iterations=20)"``.

Example:
    >>> list(SOLVERS)
    ['eigh', 'svd', 'newton_schulz', 'pade']
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
        A: matrices ``(..., n, n)``. The symmetric part ``(A + A^T) / 2`` is what counts. Eigenvalues below
            zero are taken for rounding noise: they count down to ``-eps / 2``, or are dropped.
        solver: one of `SOLVERS`.
        gradient: one of `GRADIENTS`, for the solvers by eigenvalues.
        eps: added to the eigenvalues.
        rtol: eigenvalues of ``A`` at or below ``rtol`` times the largest are the null space: they map to zero, in
            the gradient too. ``None`` (and 0) drop nothing when ``eps > 0``; when ``eps = 0``, ``None`` means
            ``n * finfo(A.dtype).eps`` (of float32 for the half types), as in `torch.linalg.pinv`.

    Returns:
        The roots ``(..., n, n)``, symmetric up to rounding, in the dtype and on the device of ``A``. A number that the
        dtype can't hold becomes the largest that it can.

    Raises:
        ArgumentError: a wrong shape, an unknown choice, a negative ``eps`` or ``rtol``.
        DtypeError: ``A`` is not real and floating.
        NonFiniteError: a matrix holds NaN or infinity.
        SolverError: no decomposition converged, retries included.

    Reference:
        Song, Sebe, Wang 2022, eq. 4; Higham, Functions of Matrices, 2008, theorem 3.11.

    Example:
        >>> matrix_sqrth(torch.tensor([[5.0, 4.0], [4.0, 5.0]]))
        tensor([[2., 1.],
                [1., 2.]])
    """
    return roots("matrix_sqrth", A, (0.5,), solver=solver, gradient=gradient, eps=eps, rtol=rtol)[0][0]


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
        A covariance of rank 1: its null space is left alone instead of blown up.

        >>> matrix_inv_sqrth(torch.tensor([[4.0, 0.0], [0.0, 0.0]]))
        tensor([[0.5000, 0.0000],
                [0.0000, 0.0000]])
    """
    return roots("matrix_inv_sqrth", A, (-0.5,), solver=solver, gradient=gradient, eps=eps, rtol=rtol)[0][0]


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
    (Q, S), _ = roots("matrix_sqrth_pair", A, (0.5, -0.5), solver=solver, gradient=gradient, eps=eps, rtol=rtol)
    return Q, S


@overridable
def roots(
    caller: str,
    A: Tensor,
    powers: tuple[float, ...],
    *,
    solver: str,
    gradient: str,
    eps: float,
    rtol: float | None,
    floor: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return ``(A + eps I)^p`` for each of ``powers`` (0.5, -0.5), and the eigenvalues where the solver has them.

    This is what the functions above and the layers share; the eigenvalues are detached, in the compute dtype and
    ascending. ``floor`` ``(...)`` is the size of the rounding noise of each matrix, where that is known: eigenvalues at
    or below it are dropped, unless ``eps`` is as large. A solver without eigenvalues drops matrices that are nothing
    but noise.
    """
    check_square(A, caller)
    check_nonnegative(eps, "eps", caller)
    if rtol is not None:
        check_nonnegative(rtol, "rtol", caller)
    entry, options = resolve(SOLVERS, solver, "solver", caller)
    resolve(GRADIENTS, gradient, "gradient", caller)
    if entry.has_eigenvalues:
        rtol = default_rtol(A, rtol) if eps == 0 else rtol or None
        return eigen_roots(A, powers, method=entry.name, gradient=gradient, eps=eps, rtol=rtol, floor=floor)
    if rtol:
        raise ArgumentError(
            f"{caller} got rtol={rtol} with solver={entry.name!r}, which has no eigenvalues to drop; "
            "use solver='eigh', or rtol=None with eps > 0."
        )
    if gradient != "exact":
        raise ArgumentError(
            f"{caller} got gradient={gradient!r} with solver={entry.name!r}, which has a gradient of its own; "
            "leave gradient='exact', or use solver='eigh'."
        )
    is_signal = None if floor is None else _is_above(A, floor, eps)
    if is_signal is not None:
        A = torch.where(is_signal, A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))
    Q, S = iterative_roots(A, entry.name, eps=eps, **options)
    if is_signal is not None:
        Q, S = Q * is_signal, S * is_signal
    return tuple(Q if power > 0 else S for power in powers), None


def _is_above(A: Tensor, floor: Tensor, eps: float) -> Tensor:
    """Return ``(..., 1, 1)`` whether matrices exceed their noise, or ``eps`` does."""
    norm: Tensor = torch.linalg.matrix_norm(A.detach().to(floor))
    return ((norm > floor) | (floor <= eps)).unsqueeze(-1).unsqueeze(-1)


def default_rtol(A: Tensor, rtol: float | None) -> float:
    """Return ``rtol``, or where it is None the relative size of rounding noise in ``A``."""
    return A.shape[-1] * torch.finfo(at_least_float32(A.dtype)).eps if rtol is None else rtol
