"""Whitening and colouring: give one feature map the mean and covariance of another."""

from torch import Tensor

from orthocond._core.applying import changeable
from orthocond._core.precision import autocast_off, lift, narrow
from orthocond.errors import ArgumentError, check_floating
from orthocond.linalg._covariance import centred
from orthocond.nn._meta import MetaLayer

__all__ = ["WhiteningColoring2d", "whiten_color"]


class WhiteningColoring2d(MetaLayer):
    r"""Whitens the content's features and colours them with the style's, image by image.

    .. math:: y = P_s^{1/2} P_c^{-1/2} (x - \mu_c) + \mu_s

    where :math:`P_c, \mu_c` are covariance and mean of the content's channels and :math:`P_s, \mu_s` those of the
    style's. Directions in which the content does not vary stay at the style's mean. For a feature map with fewer
    positions than channels, a matrix of the size of the positions is decomposed.

    *Gradient:* exact with respect to both, finite for singular covariances.

    Args:
        eps: added to the eigenvalues of both covariances; a floor for them with ``solver="eigh(clamp=true)"``.
        rtol: eigenvalues at or below ``rtol`` times the largest are dropped; ``None`` as in `matrix_sqrth`.
        solver: one of `orthocond.linalg.SOLVERS`.
        gradient: one of `orthocond.linalg.GRADIENTS`.

    Shape: content ``(B, C, H, W)`` and style ``(B, C, H', W')`` to ``(B, C, H, W)``; a style ``(1, C, H', W')`` is
    used for the whole batch. ``last_eigenvalues`` are those of the content.

    Raises:
        ArgumentError: shapes that don't fit, a wrong option.
        NonFiniteError: features hold NaN or infinity.

    Reference:
        Li et al., Universal style transfer via feature transforms, NeurIPS 2017.

    Example:
        >>> import torch
        >>> from orthocond.linalg import covariance
        >>> content, style = torch.randn(2, 4, 8, 8), 3 + 2 * torch.randn(1, 4, 16, 16)
        >>> y = WhiteningColoring2d()(content, style)
        >>> torch.allclose(covariance(y.flatten(2)), covariance(style.flatten(2)), atol=1e-4)
        True
    """

    def __init__(
        self, *, eps: float = 0.0, rtol: float | None = None, solver: str = "eigh", gradient: str = "exact"
    ) -> None:
        super().__init__()
        self.eps, self.rtol, self.solver, self.gradient = eps, rtol, solver, gradient
        self._check_options()

    def forward(self, content: Tensor, style: Tensor) -> Tensor:
        """Return the content's features with the style's mean and covariance."""
        for features in (content, style):
            check_floating(features, "WhiteningColoring2d")
        fits = content.ndim == style.ndim == 4 and content.shape[1] == style.shape[1]
        if not fits or style.shape[0] not in (1, content.shape[0]):
            raise ArgumentError(
                "WhiteningColoring2d expected content (B, C, H, W) and style (B, C, H', W') or (1, C, H', W'), got "
                f"{tuple(content.shape)} and {tuple(style.shape)}; take both from the same layer."
            )
        x, z = lift(content.flatten(2)), lift(style.flatten(2))
        coloring, _ = self._root_of_samples(z, "sqrt")
        whitening, _ = self._root_of_samples(x, "inv_sqrt")
        with autocast_off(x.device):
            y = (coloring @ whitening) @ centred(x) + z.mean(-1, keepdim=True)
        return changeable(narrow(y, content).reshape(content.shape))


def whiten_color(
    content: Tensor,
    style: Tensor,
    *,
    eps: float = 0.0,
    rtol: float | None = None,
    solver: str = "eigh",
    gradient: str = "exact",
) -> Tensor:
    """Return ``content`` ``(B, C, H, W)`` with the mean and covariance of ``style``, as `WhiteningColoring2d` does.

    Example:
        >>> import torch
        >>> whiten_color(torch.randn(1, 3, 8, 8), torch.randn(1, 3, 9, 9)).shape
        torch.Size([1, 3, 8, 8])
    """
    layer = WhiteningColoring2d(eps=eps, rtol=rtol, solver=solver, gradient=gradient)
    return layer.forward(content, style)
