"""The exceptions and warnings of orthocond, and the checks of arguments that raise them.

Everything raised on purpose derives from `OrthocondError` and from the built-in exception that fits, so
``except ValueError`` works as well. A message names the caller, the constraint, the value observed and
the remedy.
"""

import difflib
import math
from collections.abc import Iterable
from typing import SupportsFloat

import torch
from torch import Tensor, nn

__all__ = [
    "ArgumentError",
    "DtypeError",
    "GradientError",
    "NonFiniteError",
    "OrthocondError",
    "OrthocondWarning",
    "SolverError",
    "check_broadcast",
    "check_choice",
    "check_floating",
    "check_matrix",
    "check_module",
    "check_nonnegative",
    "check_square",
]


class OrthocondError(Exception):
    """The base of every exception that orthocond raises on purpose.

    Example:
        >>> try:
        ...     check_choice("cholesky", ["eigh", "svd"], "solver", "my_function")
        ... except OrthocondError as error:
        ...     print(error)
        my_function got an unknown solver 'cholesky'; choose one of eigh, svd.
    """


class ArgumentError(OrthocondError, ValueError):
    """An argument has the wrong shape or value, or names no known choice.

    Example:
        >>> from orthocond.linalg import covariance
        >>> try:
        ...     covariance(torch.ones(3))
        ... except ValueError as error:
        ...     print(error)
        covariance expected matrices (..., m, n), got (3,); flatten the rest, e.g. A.flatten(1).
    """


class DtypeError(OrthocondError, TypeError):
    """A tensor has a dtype that the function can't work with, or the argument is no tensor.

    Example:
        >>> from orthocond.linalg import covariance
        >>> try:
        ...     covariance(torch.ones(2, 3, dtype=torch.long))
        ... except TypeError as error:
        ...     print(error)
        covariance expected a floating or complex tensor, got torch.int64; convert it, e.g. A.float().
    """


class NonFiniteError(OrthocondError, ValueError):
    """A matrix that has to be decomposed holds NaN or infinity.

    Example:
        >>> from orthocond.linalg import matrix_sqrth
        >>> try:
        ...     matrix_sqrth(torch.full((2, 2), torch.nan))
        ... except ValueError as error:
        ...     print(str(error).partition(";")[0])
        the matrix to be decomposed holds NaN or infinity (4 entries)
    """


class GradientError(OrthocondError, RuntimeError):
    """A derivative was asked for that doesn't exist.

    Example:
        >>> from orthocond.linalg import matrix_sqrth
        >>> A = torch.diag(torch.tensor([1.0, 2.0])).requires_grad_()
        >>> (G,) = torch.autograd.grad(matrix_sqrth(A, gradient="taylor").sum(), A, create_graph=True)
        >>> try:
        ...     G.sum().backward()
        ... except RuntimeError as error:
        ...     print(error)
        the gradient rule 'taylor' can't be differentiated again; use gradient='exact'.
    """


class SolverError(OrthocondError, RuntimeError):
    """A decomposition did not converge or was wrong, and so were all of its retries.

    The message names shape, dtype and device, what was tried, and the remedy.

    Example:
        >>> issubclass(SolverError, RuntimeError), issubclass(SolverError, OrthocondError)
        (True, True)
    """


class OrthocondWarning(UserWarning):
    """The base of every warning that orthocond gives.

    Example:
        >>> import warnings
        >>> from orthocond import treat
        >>> with warnings.catch_warnings(record=True) as given:
        ...     warnings.simplefilter("always")
        ...     _ = treat(torch.nn.Sequential(torch.nn.Linear(3, 4)), "0", "ow+olr")
        >>> given[0].category.__name__
        'OrthocondWarning'
    """


def check_module(model: object, caller: str) -> None:
    """Raise `ArgumentError` unless ``model`` is a module.

    Example:
        >>> try:
        ...     check_module([1.0], "my_function")
        ... except ArgumentError as error:
        ...     print(error)
        my_function expected a model (torch.nn.Module), got list; pass the model itself.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"{caller} expected a model (torch.nn.Module), got {_kind_name(model)}; pass the model itself."
        )


def check_floating(A: object, caller: str, *, allow_complex: bool = False) -> None:
    """Raise `DtypeError` unless ``A`` is a tensor, real and floating, or complex where that is allowed.

    Example:
        >>> try:
        ...     check_floating([1.0, 2.0], "my_function")
        ... except DtypeError as error:
        ...     print(error)
        my_function expected a tensor, got list; convert it, e.g. torch.as_tensor(A).
    """
    if not isinstance(A, Tensor):
        raise DtypeError(f"{caller} expected a tensor, got {_kind_name(A)}; convert it, e.g. torch.as_tensor(A).")
    if not A.is_floating_point() and not (allow_complex and A.is_complex()):
        kinds = "floating or complex" if allow_complex else "real floating"
        raise DtypeError(f"{caller} expected a {kinds} tensor, got {A.dtype}; convert it, e.g. A.float().")


def check_matrix(A: Tensor, caller: str, *, allow_complex: bool = False) -> None:
    """Raise unless ``A`` is a real floating tensor ``(..., m, n)``, or complex where that is allowed.

    Example:
        >>> check_matrix(torch.ones(5, 2, 3), "my_function")
    """
    check_floating(A, caller, allow_complex=allow_complex)
    if A.ndim < 2:
        raise ArgumentError(
            f"{caller} expected matrices (..., m, n), got {tuple(A.shape)}; flatten the rest, e.g. A.flatten(1)."
        )


def check_square(A: Tensor, caller: str, *, allow_complex: bool = False) -> None:
    """Raise unless ``A`` is a real floating tensor ``(..., n, n)``, or complex where that is allowed.

    Example:
        >>> try:
        ...     check_square(torch.ones(3, 4), "my_function")
        ... except ArgumentError as error:
        ...     print(error)
        my_function expected square matrices (..., n, n), got (3, 4); pass a covariance, e.g. covariance(X).
    """
    check_floating(A, caller, allow_complex=allow_complex)
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise ArgumentError(
            f"{caller} expected square matrices (..., n, n), got {tuple(A.shape)}; "
            "pass a covariance, e.g. covariance(X)."
        )


def check_broadcast(caller: str, *batches: torch.Size) -> None:
    """Raise unless batch dimensions broadcast.

    Example:
        >>> try:
        ...     check_broadcast("my_function", torch.Size([2]), torch.Size([3]))
        ... except ArgumentError as error:
        ...     print(error)
        my_function expected batch dimensions that broadcast, got (2,) and (3,); make them equal, or 1.
    """
    if torch.compiler.is_compiling():
        return
    try:
        torch.broadcast_shapes(*batches)
    except RuntimeError:
        shapes = " and ".join(str(tuple(batch)) for batch in batches)
        raise ArgumentError(
            f"{caller} expected batch dimensions that broadcast, got {shapes}; make them equal, or 1."
        ) from None


def check_nonnegative(value: object, name: str, caller: str) -> None:
    """Raise unless ``value`` is a finite number that is not negative.

    Example:
        >>> try:
        ...     check_nonnegative(-1.0, "eps", "my_function")
        ... except ArgumentError as error:
        ...     print(error)
        my_function expected a finite number eps >= 0, got eps=-1.0; pass e.g. eps=1e-5.
    """
    if torch.compiler.is_compiling():  # the value may be symbolic there
        return
    if isinstance(value, Tensor) and (value.requires_grad or value.numel() != 1):
        learned = f"; a learned {name} can be added to the matrix, as {name} * torch.eye(n)" if name == "eps" else ""
        raise ArgumentError(
            f"{caller} expected {name} to be a number, which has no gradient, got a tensor of shape "
            f"{tuple(value.shape)}; pass a float{learned}."
        )
    if not (isinstance(value, float | int | SupportsFloat) and 0 <= float(value) < math.inf):
        raise ArgumentError(
            f"{caller} expected a finite number {name} >= 0, got {name}={value!r}; pass e.g. {name}=1e-5."
        )


def check_choice(value: object, choices: Iterable[str], name: str, caller: str) -> None:
    """Raise unless ``value`` is one of ``choices``; the message lists them and suggests the nearest.

    Example:
        >>> try:
        ...     check_choice("eig", ["eigh", "svd"], "solver", "my_function")
        ... except ArgumentError as error:
        ...     print(error)
        my_function got an unknown solver 'eig'; choose one of eigh, svd. Did you mean 'eigh'?
    """
    choices = list(choices)
    if value in choices:
        return
    if not choices:
        raise ArgumentError(f"{caller} got an unknown {name} {value!r}; there is no {name} to choose from.")
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ArgumentError(f"{caller} got an unknown {name} {value!r}; choose one of {', '.join(choices)}.{hint}")


def _kind_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
