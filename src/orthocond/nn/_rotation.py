"""A head that predicts rotations."""

import math

from torch import Tensor, nn

from orthocond.errors import ArgumentError, check_floating
from orthocond.linalg import nearest_rotation

__all__ = ["RotationHead"]


class RotationHead(nn.Module):
    r"""Maps ``d * d`` numbers to the nearest rotation: the last layer of a network that predicts one.

    .. math:: R = \arg\min_{R^T R = I,\, \det R = 1} \|A - R\|_F, \quad A = \mathrm{unflatten}(x)

    Unlike angles and quaternions, nine numbers are a continuous representation of the rotations in space, and this map
    of them is the maximum-likelihood estimate under noise.

    *Gradient:* that of `orthocond.linalg.nearest_rotation`: exact at equal singular values and at reflections, and
    bounded.

    Args:
        dim: the dimension ``d`` of the rotations.

    Shape: ``(..., d * d)`` to ``(..., d, d)``.

    Raises:
        ArgumentError: the last dimension is not ``d * d``.

    Reference:
        Levinson et al., An analysis of SVD for deep rotation estimation, NeurIPS 2020.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(16, 9), RotationHead())
        >>> R = model(torch.randn(5, 16))
        >>> R.shape
        torch.Size([5, 3, 3])
        >>> torch.allclose(R @ R.mT, torch.eye(3), atol=1e-5)
        True
    """

    def __init__(self, dim: int = 3) -> None:
        super().__init__()
        if dim < 1:
            raise ArgumentError(f"RotationHead expected dim >= 1, got {dim}.")
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers have)
        """Return the rotations nearest to ``input`` ``(..., d * d)``, row by row."""
        check_floating(input, "RotationHead")
        size = input.shape[-1] if input.ndim else 0
        if size != self.dim**2:
            hint = (
                f"RotationHead({math.isqrt(size)})" if math.isqrt(size) ** 2 == size else f"Linear(..., {self.dim**2})"
            )
            raise ArgumentError(
                f"RotationHead({self.dim}) expected (..., {self.dim**2}), got {tuple(input.shape)}; use {hint}."
            )
        return nearest_rotation(input.unflatten(-1, (self.dim, self.dim)))

    def extra_repr(self) -> str:
        """Return the dimension."""
        return str(self.dim)
