"""What every meta-layer has: the eigenvalues of its last training batch."""

import torch
from torch import Tensor, nn

from orthocond.linalg import spectrum

__all__ = ["MetaLayer"]


class MetaLayer(nn.Module):
    """A layer that takes a root of a covariance."""

    eps: float
    rtol: float | None

    def __init__(self) -> None:
        super().__init__()
        self._eigenvalues: Tensor | None = None
        self._covariance: Tensor | None = None

    @property
    def last_eigenvalues(self) -> Tensor | None:
        """The eigenvalues ``(..., C)`` of the last training batch's covariance, descending; None before the first.

        They come with the decomposition and cost nothing. A solver without eigenvalues keeps the covariance instead,
        and they are computed when asked for.
        """
        if self._eigenvalues is None and self._covariance is not None:
            self._keep_spectrum(None, spectrum(self._covariance).eigenvalues.flip(-1))
        return None if self._eigenvalues is None else self._eigenvalues.flip(-1)

    def _keep_spectrum(self, covariance: Tensor | None, eigenvalues: Tensor | None) -> None:
        """Keep the ascending eigenvalues, or for want of them the covariance."""
        if torch.compiler.is_exporting():
            return
        self._eigenvalues = None if eigenvalues is None else eigenvalues.detach()
        self._covariance = covariance.detach() if covariance is not None and eigenvalues is None else None
