"""The base class of the meta-layers: the options of the root, and the eigenvalues of the last training batch."""

import math
import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orthocond._core.private import is_exporting, transforms_are_seen
from orthocond._core.registry import resolve
from orthocond.errors import NonFiniteError, OrthocondWarning
from orthocond.linalg import SOLVERS, spectrum
from orthocond.linalg._counts import FallbackCount
from orthocond.linalg._gap import condition_on_support
from orthocond.linalg._roots import spectral
from orthocond.linalg._smaller_side import spectral_of_samples, upper_triangle

__all__ = ["Estimates", "MetaLayer"]

_ENOUGH = 100
"""Covariances after which it is clear whether a solver with a certificate is of use."""


class Estimates(NamedTuple):
    """What a solver without eigenvalues knows of the covariances of the last training batch, each ``(...)``."""

    cond: Tensor
    """The condition number of what was inverted: on the support, or with ``eps`` that of ``P + eps I``."""
    rank: Tensor
    """How many eigenvalues were inverted."""
    size: int
    """The number of all eigenvalues."""


class MetaLayer(nn.Module):
    """A layer that takes a function of a covariance; the base class of the meta-layers.

    `orthocond.find_pre_svd`, `orthocond.ConditionMonitor` and the treatments find meta-layers by this class.

    Example:
        >>> from orthocond.nn import CovariancePool2d
        >>> isinstance(CovariancePool2d(), MetaLayer)
        True
    """

    eps: float
    rtol: float | None
    solver: str
    gradient: str

    def __init__(self) -> None:
        super().__init__()
        self._eigenvalues: Tensor | None = None
        self._covariance: Tensor | None = None
        self._noise: Tensor | None = None
        self._whitening: Tensor | None = None
        self._estimates: Estimates | None = None
        self._num_fallbacks, self._num_matrices, self._has_advised = 0, 0, False

    @property
    def clamp(self) -> bool:
        """Whether ``eps`` is a floor for the eigenvalues, by ``solver="eigh(clamp=true)"``, instead of being added."""
        return bool(resolve(SOLVERS, self.solver, "solver", type(self).__name__)[1].get("clamp"))

    @property
    def last_eigenvalues(self) -> Tensor | None:
        """The eigenvalues ``(..., C)`` of the last training batch's covariance, descending; None before the first.

        They come with the decomposition and cost nothing. A solver without eigenvalues keeps the covariance instead,
        and they are computed on access.
        """
        if self._eigenvalues is None and self._covariance is not None:
            self._eigenvalues = spectrum(self._covariance).eigenvalues
        return self._eigenvalues

    @property
    def last_noise(self) -> Tensor | None:
        """The rounding noise ``(...)`` of the same covariance: eigenvalues at or below it were dropped; None before."""
        return self._noise

    @property
    def last_estimates(self) -> Estimates | None:
        """Estimates of condition number and rank of the last training batch's covariance, without its eigenvalues.

        They come from norms of the covariance and of its inverse root (`condition_on_support`), which a whitening layer
        with ``solver="products"`` has. None before the first batch, and for every other layer: `last_eigenvalues` are
        exact there.
        """
        if self._estimates is None and self._is_certified and self._covariance is not None:
            P, S = self._covariance, self._whitening
            if S is not None:
                P = P + self.eps * torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) if self.eps else P
                self._estimates = Estimates(*condition_on_support(P, S), P.shape[-1])
        return self._estimates

    @property
    def _is_certified(self) -> bool:
        """Whether the solver is the one with a certificate, which may fall back."""
        return isinstance(self.solver, str) and self.solver.startswith("products")

    @property
    def num_fallbacks(self) -> tuple[int, int]:
        """The number of matrices that were decomposed because ``solver="products"`` had no certificate, and the total.

        Calls in compiled code are not counted.
        """
        return self._num_fallbacks, self._num_matrices

    def samples(self, x: Tensor) -> Tensor:
        """Return the input as the samples ``(..., c, N)`` of the covariances that it decomposes: one for each image."""
        return x.flatten(2)

    def extra_repr(self) -> str:
        """Return the options of the root that differ from their defaults."""
        shown = [f"eps={self.eps}", f"rtol={self.rtol}"]
        shown += [f"{name}={value!r}" for name, value in (("solver", self.solver), ("gradient", self.gradient))
                  if value not in ("eigh", "exact")]  # fmt: skip
        return ", ".join(shown)

    def _root(
        self, P: Tensor, functions: tuple[str, ...], floor: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return functions of covariances, by name, and the eigenvalues where the solver has them.

        ``floor`` is the `noise_floor` of the covariances.
        """
        name, options = type(self).__name__, {"solver": self.solver, "gradient": self.gradient}
        counted = self._is_certified and not torch.compiler.is_compiling()
        try:
            with FallbackCount() if counted else nullcontext() as fallbacks:
                results = spectral(name, P, functions, **options, eps=self.eps, rtol=self.rtol, floor=floor)
        except NonFiniteError as error:
            raise NonFiniteError(f"{name}({self.extra_repr()}): {error}") from None
        if fallbacks is not None:
            self._count_fallbacks(fallbacks.number, math.prod(P.shape[:-2]))
        return results

    def _count_fallbacks(self, fallbacks: int, num_matrices: int) -> None:
        self._num_fallbacks += fallbacks
        self._num_matrices += num_matrices
        if self._num_matrices < _ENOUGH or 2 * self._num_fallbacks < self._num_matrices or self._has_advised:
            return
        self._has_advised = True
        warnings.warn(
            f"{type(self).__name__} decomposed {self._num_fallbacks} of its {self._num_matrices} covariances, because "
            "they lack the spectral gap that solver='products' needs; treat the layer in front with 'gauge', or use "
            "solver='eigh'.",
            OrthocondWarning,
            stacklevel=2,
        )

    def _root_of_samples(self, X: Tensor, function: str, *, upper: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return a function of the covariances of samples ``(..., C, N)``, and the eigenvalues; keep these.

        With ``upper`` it is the upper triangle alone.
        """
        name = type(self).__name__
        options: dict[str, Any] = {"solver": self.solver, "gradient": self.gradient, "eps": self.eps, "rtol": self.rtol}
        counted = self._is_certified and not torch.compiler.is_compiling()
        try:
            with FallbackCount() if counted else nullcontext() as fallbacks:
                (value,), eigenvalues, P, noise = spectral_of_samples(name, X, function, upper=upper, **options)
        except NonFiniteError as error:
            raise NonFiniteError(f"{name}({self.extra_repr()}): {error}") from None
        if fallbacks is not None:
            self._count_fallbacks(fallbacks.number, math.prod(X.shape[:-2]))
        self._keep_spectrum(P, eigenvalues, noise)
        return upper_triangle(value) if upper and P is not None else value, eigenvalues

    def _check_options(self, functions: tuple[str, ...] = ("sqrt",)) -> None:
        """Raise for a wrong combination of options now, not in training."""
        self._root(torch.eye(1, dtype=torch.float64), functions)
        self._num_fallbacks = self._num_matrices = 0

    def _keeps_spectrum(self) -> bool:
        """Return whether this is a training forward with tensors that outlive it; those of `torch.func` don't."""
        if not self.training or is_exporting():
            return False
        return torch.compiler.is_compiling() or not transforms_are_seen()

    def _keep_spectrum(self, covariance: Tensor | None, eigenvalues: Tensor | None, noise: Tensor) -> None:
        """Keep the eigenvalues, given in ascending order, or without them the covariance, and its noise."""
        if not self._keeps_spectrum():
            return
        self._eigenvalues = None if eigenvalues is None else eigenvalues.detach().flip(-1)
        self._covariance = covariance.detach() if eigenvalues is None and covariance is not None else None
        self._noise = noise
        self._estimates = None
