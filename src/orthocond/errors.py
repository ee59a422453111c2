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
from torch import Tensor

__all__ = [
    "ArgumentError",
    "DtypeError",
    "GradientError",
    "NonFiniteError",
    "OrthocondError",
    "OrthocondWarning",
    "SolverError",
    "check_choice",
    "check_floating",
    "check_matrix",
    "check_nonnegative",
    "check_square",
]


class OrthocondError(Exception):
    """The base of every exception that orthocond raises on purpose."""


class ArgumentError(OrthocondError, ValueError):
    """An argument has the wrong shape or value, or names no known choice."""


class DtypeError(OrthocondError, TypeError):
    """A tensor has a dtype that the function can't work with."""


class NonFiniteError(OrthocondError, ValueError):
    """A matrix that has to be decomposed holds NaN or infinity."""


class GradientError(OrthocondError, RuntimeError):
    """A derivative was asked for that doesn't exist."""


class SolverError(OrthocondError, RuntimeError):
    """A decomposition did not converge, and neither did any of its retries."""


class OrthocondWarning(UserWarning):
    """The base of every warning that orthocond gives."""


def check_floating(A: Tensor, caller: str) -> None:
    """Raise `DtypeError` unless ``A`` is real and floating."""
    if not A.is_floating_point():
        raise DtypeError(f"{caller} expected a real floating tensor, got {A.dtype}; convert it, e.g. A.float().")


def check_matrix(A: Tensor, caller: str) -> None:
    """Raise unless ``A`` is a real floating tensor ``(..., m, n)``."""
    check_floating(A, caller)
    if A.ndim < 2:
        raise ArgumentError(
            f"{caller} expected matrices (..., m, n), got {tuple(A.shape)}; flatten the rest, e.g. A.flatten(1)."
        )


def check_square(A: Tensor, caller: str) -> None:
    """Raise unless ``A`` is a real floating tensor ``(..., n, n)``."""
    check_floating(A, caller)
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise ArgumentError(
            f"{caller} expected square matrices (..., n, n), got {tuple(A.shape)}; "
            "pass a covariance, e.g. covariance(X)."
        )


def check_nonnegative(value: float, name: str, caller: str) -> None:
    """Raise unless ``value`` is a finite number that is not negative."""
    if torch.compiler.is_compiling():  # the value may be symbolic there
        return
    if not (isinstance(value, float | int | SupportsFloat) and 0 <= float(value) < math.inf):
        raise ArgumentError(
            f"{caller} expected a finite number {name} >= 0, got {name}={value!r}; pass e.g. {name}=1e-5."
        )


def check_choice(value: object, choices: Iterable[str], name: str, caller: str) -> None:
    """Raise unless ``value`` is one of ``choices``; the message lists them and suggests the nearest."""
    choices = list(choices)
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ArgumentError(f"{caller} got an unknown {name} {value!r}; choose one of {', '.join(choices)}.{hint}")
