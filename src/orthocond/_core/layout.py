"""Which matrix is meant by the weight of a layer."""

from torch import Tensor

__all__ = ["kernel_matrix", "matrix_kernel"]


def kernel_matrix(weight: Tensor, *, groups: int = 1, transposed: bool = False) -> Tensor:
    """Return the matrix of a linear layer or a convolution: a row for each output channel.

    | layer | weight | matrix |
    | --- | --- | --- |
    | linear | ``(out, in)`` | the weight itself |
    | convolution | ``(out, in/groups, *k)`` | ``(out, in * k)``; for groups ``(groups, out/groups, in/groups * k)`` |
    | transposed convolution | ``(in, out/groups, *k)`` | the same, with the first two dimensions exchanged |

    Each group of a convolution is a map of its own, so it is a matrix of its own.

    Example:
        >>> import torch
        >>> kernel_matrix(torch.nn.Conv2d(3, 64, 3).weight).shape
        torch.Size([64, 27])
        >>> kernel_matrix(torch.nn.Conv2d(8, 16, 3, groups=4).weight, groups=4).shape
        torch.Size([4, 4, 18])
    """
    grouped: Tensor = weight.unflatten(0, (groups, -1))
    if transposed:
        grouped = grouped.transpose(1, 2)
    matrix = grouped.flatten(2)
    return matrix.squeeze(0) if groups == 1 else matrix


def matrix_kernel(matrix: Tensor, like: Tensor, *, groups: int = 1, transposed: bool = False) -> Tensor:
    """Return the weight of the shape of ``like`` whose `kernel_matrix` is ``matrix``."""
    if not transposed:
        return matrix.reshape(like.shape)
    grouped = matrix.reshape(groups, like.shape[1], like.shape[0] // groups, *like.shape[2:])
    return grouped.transpose(1, 2).reshape(like.shape)
