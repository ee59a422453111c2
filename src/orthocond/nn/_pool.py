"""Global covariance pooling."""

from torch import Tensor

from orthocond.errors import ArgumentError, check_floating
from orthocond.linalg import FUNCTIONS
from orthocond.nn._meta import MetaLayer

__all__ = ["CovariancePool2d"]


class CovariancePool2d(MetaLayer):
    r"""Pools images to the square root, or another function, of the covariance of their channels.

    .. math:: Q = f(X J X^T + \epsilon I), \quad X \in \mathbb{R}^{C \times HW}, \quad f(x) = x^{1/2}

    It replaces average pooling in front of a classifier, and describes how the channels vary together. With fewer
    positions than channels it decomposes a matrix of the size of the positions, not of the channels.

    *Gradient:* exact, and finite when there are fewer positions than channels (``H W < C``), where the covariance is
    singular: its null space maps to zero, in the gradient too.

    Args:
        function: one of `orthocond.linalg.FUNCTIONS`: ``"sqrt"``, ``"log"`` for log-Euclidean pooling, or
            ``"power(exponent=0.3)"`` for power normalisation.
        vectorize: return the upper triangle ``(B, C (C + 1) / 2)`` instead of the matrices ``(B, C, C)``.
        eps: added to the eigenvalues; a floor for them with ``solver="eigh(clamp=true)"``.
        rtol: eigenvalues at or below ``rtol`` times the largest are dropped; ``None`` as in `matrix_sqrth`.
        solver: one of `orthocond.linalg.SOLVERS`.
        gradient: one of `orthocond.linalg.GRADIENTS`.

    Shape: ``(B, C, H, W)`` to ``(B, C (C + 1) / 2)`` or ``(B, C, C)``.

    Raises:
        ArgumentError: a wrong shape or option.
        NonFiniteError: the features hold NaN or infinity.

    Reference:
        Li et al., Is second-order information helpful for large-scale visual recognition?, ICCV 2017; Huang and Van
        Gool, A Riemannian network for SPD matrix learning, AAAI 2017 (log); Song, Sebe, Wang 2022, eqs. 2 and 4 and
        appendix B.2.

    Example:
        >>> import torch
        >>> CovariancePool2d()(torch.randn(2, 8, 5, 5)).shape
        torch.Size([2, 36])
        >>> CovariancePool2d(function="log", vectorize=False)(torch.randn(2, 8, 5, 5)).shape
        torch.Size([2, 8, 8])
    """

    def __init__(
        self,
        *,
        function: str = "sqrt",
        vectorize: bool = True,
        eps: float = 0.0,
        rtol: float | None = None,
        solver: str = "eigh",
        gradient: str = "exact",
    ) -> None:
        super().__init__()
        if not isinstance(function, str):
            raise ArgumentError(
                f"CovariancePool2d expected the name of a function, got {function!r}; choose one of "
                f"{', '.join(FUNCTIONS)}."
            )
        self.function = function
        self.vectorize, self.eps, self.rtol, self.solver, self.gradient = vectorize, eps, rtol, solver, gradient
        self._check_options((function,))

    def forward(self, x: Tensor) -> Tensor:
        """Return the descriptors of ``x`` ``(B, C, H, W)``."""
        check_floating(x, "CovariancePool2d")
        if x.ndim != 4:
            raise ArgumentError(f"CovariancePool2d expected input (B, C, H, W), got {tuple(x.shape)}; pass features.")
        Q, eigenvalues = self._root_of_samples(x.flatten(2), self.function, upper=self.vectorize)
        # An iteration needs its result again for the gradient, and the caller may change it in place.
        return Q.clone() if eigenvalues is None and not self.vectorize else Q

    def extra_repr(self) -> str:
        """Return the options."""
        function = "" if self.function == "sqrt" else f"function={self.function!r}, "
        return f"{function}vectorize={self.vectorize}, {super().extra_repr()}"
