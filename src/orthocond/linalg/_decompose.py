"""Eigenvalues and eigenvectors of symmetric matrices, verified, with retries that are counted.

LAPACK and its GPU cousins sometimes don't converge, and sometimes return what is no decomposition (`_verify.py`). Such
a matrix is tried alone, so that the others keep their results, then in float64, with a jitter relative to its trace,
and by the SVD. Every attempt that fails is counted.
"""

import cmath
import math
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # documented, missing from the stubs

from orthocond._core.precision import real_dtype, widen
from orthocond.errors import NonFiniteError, OrthocondWarning, SolverError
from orthocond.linalg._counts import count_failure
from orthocond.linalg._threads import eigh
from orthocond.linalg._verify import lowest_of, probe, verified_eigen, verified_one, verified_svd

__all__ = [
    "DECOMPOSITIONS",
    "check_finite",
    "decompose",
    "decompose_one",
    "retried",
    "svd",
]

Decomposition = Callable[[Tensor], tuple[Tensor, Tensor]]

_warned: set[str] = set()


def decompose(
    A: Tensor, method: str, *, asymmetry: Tensor | None = None, noise: float = math.inf, semidefinite: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues ``(..., n)``, ascending, and the eigenvectors ``(..., n, n)`` of symmetric ``A``.

    Args:
        A: matrices in float32 at least.
        method: one of `DECOMPOSITIONS`.
        asymmetry: a number on the device: how far the matrix was from symmetric, relative to its largest entry.
        noise: an asymmetry above this, or with ``semidefinite`` a negative eigenvalue that is as large relative to the
            largest, can't be rounding, and is worth a warning.
        semidefinite: whether the matrices should have no negative eigenvalues.

    Raises:
        NonFiniteError: ``A`` holds NaN or infinity.
        SolverError: no attempt gave a decomposition.
    """
    if torch.compiler.is_compiling():
        eigenvalues, eigenvectors = _decompose_op(A, method, asymmetry, noise, semidefinite)
        return eigenvalues, eigenvectors
    return _decompose(A, method, asymmetry, noise, semidefinite)


def _decompose(
    A: Tensor, method: str, asymmetry: Tensor | None = None, noise: float = math.inf, semidefinite: bool = False
) -> tuple[Tensor, Tensor]:
    if A.is_meta:
        return DECOMPOSITIONS[method](A)
    if A.device.type == "mps":  # it has neither the decomposition nor float64
        eigenvalues, eigenvectors = _decompose(widen(A), method, asymmetry, noise, semidefinite)
        return eigenvalues.to(A.device, real_dtype(A.dtype)), eigenvectors.to(A)
    try:
        eigenvalues, eigenvectors = DECOMPOSITIONS[method](A)
    except LinAlgError:
        return retried(A, method)
    wrong, lowest, asymmetric = verified_eigen(A, eigenvalues, eigenvectors, asymmetry)
    if wrong is not None:
        return retried(A, method, (eigenvalues, eigenvectors, wrong))
    if asymmetric > noise or (semidefinite and lowest < -noise):
        warn_of_input(asymmetric, lowest, noise, semidefinite=semidefinite)
    return eigenvalues, eigenvectors


def decompose_one(
    A: Tensor, *, asymmetry: Tensor | None = None, noise: float = math.inf, semidefinite: bool = False
) -> tuple[Tensor, Tensor, float, float]:
    """Return what `decompose` does by eigh, and the smallest and the largest eigenvalue, in fewer calls.

    It is for one real matrix ``(n, n)`` on the CPU, in code that is not compiled.
    """
    known = probe(A.shape[-1], A.dtype, A.device)
    of_A = A.mv(known.x).tolist()
    if not math.isfinite(sum(of_A)):  # MKL would print complaints
        check_finite(A)
    try:
        eigenvalues, U = torch.linalg.eigh(A)
        values = verified_one(known, of_A, eigenvalues, U)
        if values is None:
            raise LinAlgError
    except LinAlgError:
        eigenvalues, U = retried(A, "eigh")
        return eigenvalues, U, eigenvalues[0].item(), eigenvalues[-1].item()
    if asymmetry is not None or values[0] < 0:
        asymmetric, lowest = 0.0 if asymmetry is None else asymmetry.item(), lowest_of(values)
        if asymmetric > noise or lowest < -noise:
            warn_of_input(asymmetric, lowest, noise, semidefinite=semidefinite)
    return eigenvalues, U, values[0], values[-1]


@torch.library.custom_op("orthocond::decompose", mutates_args=())
def _decompose_op(
    A: Tensor, method: str, asymmetry: Tensor | None, noise: float, semidefinite: bool
) -> tuple[Tensor, Tensor]:
    """The same, opaque to `torch.compile`: the retries depend on the data."""
    eigenvalues, eigenvectors = _decompose(A, method, asymmetry, noise, semidefinite)
    return eigenvalues.contiguous(), eigenvectors.contiguous()


@_decompose_op.register_fake
def _(A: Tensor, method: str, asymmetry: Tensor | None, noise: float, semidefinite: bool) -> tuple[Tensor, Tensor]:
    return A.new_empty(A.shape[:-1], dtype=real_dtype(A.dtype)), A.new_empty(A.shape)


def warn_of_input(asymmetry: float, lowest: float, noise: float, *, semidefinite: bool) -> None:
    """Warn, once for each reason, about matrices that are not valid covariances."""
    if asymmetry > noise:
        _warn_once(
            f"a matrix far from symmetric was decomposed: A and its transpose differ by {asymmetry:.2g} of the largest "
            "entry, which is more than rounding. The symmetric part (A + A^T) / 2 is used; pass a covariance, e.g. "
            "covariance(X)."
        )
    if semidefinite and lowest < -noise:
        _warn_once(
            f"a matrix with a negative eigenvalue, {lowest:.2g} times the largest in size, was decomposed, which is "
            "more than rounding. Negative eigenvalues are dropped, or raised by eps; pass a positive semi-definite "
            "matrix, e.g. covariance(X)."
        )


def _warn_once(message: str) -> None:
    kind = message.partition(",")[0].partition(":")[0]
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(message, OrthocondWarning, stacklevel=2)


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
    other = "svd" if method == "eigh" else "eigh"
    yield other, other, DECOMPOSITIONS[other]


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


def retried(A: Tensor, method: str, first: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return the decomposition after a first attempt that failed for all matrices, or for those in a mask."""
    check_finite(A)
    matrices = A.reshape(-1, *A.shape[-2:])
    is_batch = len(matrices) > 1
    if first is None:
        alone = [_decompose_one(matrix, method, again=is_batch) for matrix in matrices]
        eigenvalues, eigenvectors = (torch.stack(parts) for parts in zip(*alone, strict=True))
    else:
        eigenvalues, eigenvectors = (part.clone().reshape(-1, *shape) for part, shape in zip(
            first[:2], (A.shape[-1:], A.shape[-2:]), strict=True))  # fmt: skip
        places = first[2].nonzero().flatten().tolist()
        if is_batch:
            count_failure(method, len(places))
        for i in places:
            eigenvalues[i], eigenvectors[i] = _decompose_one(matrices[i], method, again=is_batch)
    return eigenvalues.reshape(A.shape[:-1]), eigenvectors.reshape(A.shape)


def _decompose_one(A: Tensor, method: str, *, again: bool) -> tuple[Tensor, Tensor]:
    """Return the decomposition of one matrix; ``again`` if the first attempt was at a whole batch."""
    tried = []
    for number, (name, description, attempt) in enumerate(_attempts(A, method)):
        try:
            if number == 0 and not again:
                raise LinAlgError
            eigenvalues, eigenvectors = attempt(A)
            if verified_eigen(A, eigenvalues, eigenvectors).wrong is not None:
                raise LinAlgError
            return eigenvalues, eigenvectors
        except LinAlgError:
            tried.append(description)
            count_failure(name)
    n = A.shape[-1]
    raise SolverError(
        f"no decomposition of a {n}x{n} matrix of {A.dtype} on {A.device} converged to a right result "
        f"(tried: {', '.join(tried)}); raise eps, or scale the features in front of the layer."
    )


def svd(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin singular value decomposition of wide matrices ``(..., m, n)``, verified.

    A matrix that fails, which is counted, is tried alone and transposed. The last resort is the Gram matrix: less
    accurate, but with the retries of `decompose`.
    """
    if A.is_meta:
        return torch.linalg.svd(A, full_matrices=False)  # type: ignore[no-any-return]
    try:
        U, singular_values, Vh = torch.linalg.svd(A, full_matrices=False)
        wrong = verified_svd(A, U, singular_values, Vh)
        if wrong is None:
            return U, singular_values, Vh
    except LinAlgError:
        wrong = None
    check_finite(A)
    matrices = A.reshape(-1, *A.shape[-2:])
    is_batch = len(matrices) > 1
    if wrong is None:
        alone = [_svd_of_one(matrix, again=is_batch) for matrix in matrices]
    else:
        if is_batch:
            count_failure("svd", int(wrong.sum()))
        first = zip(*(part.reshape(-1, *part.shape[A.ndim - 2 :]) for part in (U, singular_values, Vh)), strict=True)
        alone = [
            _svd_of_one(matrix, again=is_batch) if is_wrong else parts
            for matrix, is_wrong, parts in zip(matrices, wrong.tolist(), first, strict=True)
        ]
    U, singular_values, Vh = (
        torch.stack(parts).reshape(*A.shape[:-2], *parts[0].shape) for parts in zip(*alone, strict=True)
    )
    return U, singular_values, Vh


def _svd_of_one(A: Tensor, *, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    for number, is_transposed in enumerate((False, True)):
        try:
            if number == 0 and not again:
                raise LinAlgError
            U, singular_values, Vh = torch.linalg.svd(A.mH if is_transposed else A, full_matrices=False)
            if is_transposed:
                U, Vh = Vh.mH, U.mH
            if verified_svd(A, U, singular_values, Vh) is not None:
                raise LinAlgError
            return U, singular_values, Vh
        except LinAlgError:
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
