"""Eigenvalues and eigenvectors of symmetric matrices, with retries that are counted.

LAPACK and its GPU cousins sometimes don't converge. Then each matrix of the batch is tried alone, so that
the others keep their results, and the one that fails is tried in float64, with a jitter relative to its
trace, and by the SVD. Every attempt that fails is counted.
"""

import cmath
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # documented, missing from the stubs

from orthocond._core.precision import real_dtype, widen
from orthocond.errors import NonFiniteError, SolverError
from orthocond.linalg._threads import eigh

__all__ = ["DECOMPOSITIONS", "check_finite", "count_failure", "decompose", "solver_failures", "svd"]

Decomposition = Callable[[Tensor], tuple[Tensor, Tensor]]

_failures: Counter[str] = Counter()
_lock = threading.Lock()
_COUNTED = ("eigh", "svd", "newton_schulz", "pade")


def solver_failures(*, reset: bool = False) -> dict[str, int]:
    """Return how many attempts at a root or decomposition did not converge, by the solver that failed.

    The counts are of this process since it started, or since the last ``reset``. An attempt that fails is
    retried (see `SolverError` for what happens when all retries fail), so a count above zero does not
    mean that a result is missing. The paper reports these counts as *failure times* (Table 5).

    Args:
        reset: set all counts to zero after reading them.

    Returns:
        The number of failed attempts for each solver, zeros included.

    Example:
        >>> list(solver_failures())
        ['eigh', 'svd', 'newton_schulz', 'pade']
    """
    with _lock:
        counts = {name: _failures[name] for name in _COUNTED}
        if reset:
            _failures.clear()
    return counts


def decompose(A: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues ``(..., n)``, ascending, and the eigenvectors ``(..., n, n)`` of symmetric ``A``.

    Raises:
        NonFiniteError: ``A`` holds NaN or infinity.
        SolverError: no attempt converged.
    """
    if torch.compiler.is_compiling():
        eigenvalues, eigenvectors = _decompose_op(A, method)
        return eigenvalues, eigenvectors
    return _decompose(A, method)


def _decompose(A: Tensor, method: str) -> tuple[Tensor, Tensor]:
    if A.is_meta:
        return DECOMPOSITIONS[method](A)
    check_finite(A)
    if A.device.type == "mps":  # it has neither the decomposition nor float64
        eigenvalues, eigenvectors = _decompose(widen(A), method)
        return eigenvalues.to(A.device, real_dtype(A.dtype)), eigenvectors.to(A)
    try:
        return DECOMPOSITIONS[method](A)
    except LinAlgError:
        pass
    matrices = A.reshape(-1, *A.shape[-2:])
    alone = [_decompose_one(matrix, method, again=len(matrices) > 1) for matrix in matrices]
    eigenvalues = torch.stack([values for values, _ in alone]).reshape(A.shape[:-1])
    return eigenvalues, torch.stack([vectors for _, vectors in alone]).reshape(A.shape)


@torch.library.custom_op("orthocond::decompose", mutates_args=())
def _decompose_op(A: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """The same, opaque to `torch.compile`: the retries depend on the data."""
    eigenvalues, eigenvectors = _decompose(A, method)
    return eigenvalues.contiguous(), eigenvectors.contiguous()


@_decompose_op.register_fake
def _(A: Tensor, method: str) -> tuple[Tensor, Tensor]:
    return A.new_empty(A.shape[:-1], dtype=real_dtype(A.dtype)), A.new_empty(A.shape)


def _by_svd(A: Tensor) -> tuple[Tensor, Tensor]:
    # A symmetric matrix has u_i = sign(l_i) v_i; below rounding the sign means nothing, and neither does l_i.
    left, singular_values, right = torch.linalg.svd(A)
    signs = torch.linalg.vecdot(left, right.mH, dim=-2).real.sign()
    eigenvalues, order = (singular_values * signs).sort(-1)
    return eigenvalues, left.gather(-1, order.unsqueeze(-2).expand_as(left))


DECOMPOSITIONS: Mapping[str, Decomposition] = {"eigh": eigh, "svd": _by_svd}


def _attempts(A: Tensor, method: str) -> Iterator[tuple[str, str, Decomposition]]:
    """Yield the attempts at one matrix: the decomposition used, a description, and the function."""
    yield method, f"{method} in {A.dtype}".replace("torch.", ""), DECOMPOSITIONS[method]
    if A.dtype != torch.float64:
        yield method, f"{method} in float64", lambda A: _in_float64(A, DECOMPOSITIONS[method])
    yield method, f"{method} with a jitter", lambda A: _with_jitter(A, DECOMPOSITIONS[method])
    if method != "svd":
        yield "svd", "svd", DECOMPOSITIONS["svd"]


def _in_float64(A: Tensor, decomposition: Decomposition) -> tuple[Tensor, Tensor]:
    eigenvalues, eigenvectors = decomposition(widen(A))
    return eigenvalues.to(A.device, real_dtype(A.dtype)), eigenvectors.to(A)


def _with_jitter(A: Tensor, decomposition: Decomposition) -> tuple[Tensor, Tensor]:
    # A shift by a multiple of the identity keeps the eigenvectors; uneven noise breaks what stalls the iteration.
    n = A.shape[-1]
    size = 10 * torch.finfo(A.dtype).eps * A.diagonal().abs().mean()
    ramp = size * torch.arange(1, n + 1, dtype=A.dtype, device=A.device) / n
    eigenvalues, eigenvectors = decomposition(A + torch.diag(ramp))
    return eigenvalues - ramp.mean(), eigenvectors


def _decompose_one(A: Tensor, method: str, *, again: bool) -> tuple[Tensor, Tensor]:
    """Return the decomposition of one matrix; ``again`` if the first attempt was at a whole batch."""
    tried = []
    for number, (name, description, attempt) in enumerate(_attempts(A, method)):
        try:
            if number == 0 and not again:
                raise LinAlgError
            return attempt(A)
        except LinAlgError:
            tried.append(description)
            count_failure(name)
    n = A.shape[-1]
    raise SolverError(
        f"no decomposition of a {n}x{n} matrix of {A.dtype} on {A.device} converged (tried: {', '.join(tried)}); "
        "raise eps, or scale the features in front of the layer."
    )


def svd(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin singular value decomposition of wide matrices ``(..., m, n)``.

    Where it does not converge, which is counted, the Gram matrix has the last word: less accurate, but with the
    retries of `decompose`.
    """
    try:
        U, singular_values, Vh = torch.linalg.svd(A, full_matrices=False)
        return U, singular_values, Vh
    except LinAlgError:
        if A.ndim > 2:
            alone = [svd(matrix) for matrix in A.flatten(0, -3)]
            U, singular_values, Vh = (
                torch.stack(parts).unflatten(0, A.shape[:-2]) for parts in zip(*alone, strict=True)
            )
            return U, singular_values, Vh
    count_failure("svd")
    eigenvalues, U = decompose(A @ A.mH, "eigh")
    singular_values, U = eigenvalues.flip(-1).clamp(min=0).sqrt(), U.flip(-1)
    return U, singular_values, U.mH @ A / torch.where(singular_values > 0, singular_values, 1.0).unsqueeze(-1)


def check_finite(A: Tensor) -> None:
    """Raise `NonFiniteError` with the place where ``A`` ``(..., m, n)`` holds NaN or infinity."""
    if cmath.isfinite(A.sum().item()):  # one cheap pass; a sum that overflows only sends us on
        return
    finite = torch.isfinite(A)
    if finite.all():
        return
    bad = (~finite).flatten(-2).any(-1)
    where = f"matrix {tuple(bad.nonzero()[0].tolist())} of the batch {tuple(bad.shape)}" if bad.ndim else "the matrix"
    raise NonFiniteError(
        f"{where} to be decomposed holds NaN or infinity ({int((~finite).sum())} entries); look for the overflow in "
        "the layers in front, e.g. with torch.autograd.set_detect_anomaly(True), or lower the learning rate."
    )


def count_failure(solver: str, times: int = 1) -> None:
    """Count attempts that did not converge."""
    with _lock:
        _failures[solver] += times
