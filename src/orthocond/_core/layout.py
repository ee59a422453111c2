"""Which matrix is meant by the weight of a layer."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

__all__ = ["Layout"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layout:
    """How the weight of a linear layer or a convolution is read as a matrix: one row per output channel.

    | layer | weight | matrix |
    | --- | --- | --- |
    | linear | ``(out, in)`` | the weight itself |
    | convolution | ``(out, in/groups, *k)`` | ``(out, in * k)``; for groups ``(groups, out/groups, in/groups * k)`` |
    | transposed convolution | ``(in, out/groups, *k)`` | the same, with the first two dimensions exchanged |

    Each group of a convolution is a map of its own, so it is a matrix of its own.

    Example:
        >>> conv = nn.Conv2d(8, 16, 3, groups=4)
        >>> Layout.of(conv).matrix(conv.weight).shape
        torch.Size([4, 4, 18])
    """

    groups: int = 1
    transposed: bool = False

    @classmethod
    def of(cls, layer: nn.Module) -> Self:
        """Return the layout of a layer's weight."""
        return cls(getattr(layer, "groups", 1), isinstance(layer, _TRANSPOSED))

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the matrix of a weight, or of anything of its shape."""
        grouped: Tensor = weight.unflatten(0, (self.groups, -1))
        if self.transposed:
            grouped = grouped.transpose(1, 2)
        matrix = grouped.flatten(2)
        return matrix.squeeze(0) if self.groups == 1 else matrix

    def kernel(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Return the weight of the shape of ``like`` whose matrix is ``matrix``."""
        if not self.transposed:
            return matrix.reshape(like.shape)
        grouped = matrix.reshape(self.groups, like.shape[1], like.shape[0] // self.groups, *like.shape[2:])
        return grouped.transpose(1, 2).reshape(like.shape)
