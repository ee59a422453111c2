"""The nearest orthogonal gradient."""

from torch import Tensor

from orthocond._core.layout import Layout
from orthocond.errors import check_floating
from orthocond.linalg import nearest_orthogonal

__all__ = ["nearest_orthogonal_gradient"]


def nearest_orthogonal_gradient(
    parameter: Tensor, *, groups: int = 1, transposed: bool = False, solver: str = "gram"
) -> Tensor | None:
    r"""Return the orthogonal matrix nearest to the gradient of a parameter, in the parameter's shape.

    .. math:: R = U V^T, \quad \partial l / \partial W = U \Sigma V^T

    Every direction of the gradient gets the same step; the directions stay. The gradient itself is not changed: put
    the result into ``parameter.grad`` between ``backward`` and ``step``, or let `orthocond.treat` do it.

    Args:
        parameter: of at least two dimensions, with a gradient; flattened to ``(out, in * k)``.
        groups: of a grouped convolution: each group is a matrix of its own.
        transposed: whether the parameter belongs to a transposed convolution ``(in, out, *k)``.
        solver: one of `orthocond.linalg.POLAR_SOLVERS`.

    Returns:
        The gradient's polar factor, zero for a zero gradient, ``None`` where there is none.

    Raises:
        ArgumentError: the parameter is no matrix.
        NonFiniteError: the gradient holds NaN or infinity.

    Reference:
        Song, Sebe, Wang 2022, eqs. 14 to 17.

    Example:
        >>> import torch
        >>> W = torch.eye(2, requires_grad=True)
        >>> (W * torch.tensor([[3.0, 0.0], [0.0, -0.1]])).sum().backward()
        >>> nearest_orthogonal_gradient(W)
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    check_floating(parameter, "nearest_orthogonal_gradient")
    if parameter.grad is None:
        return None
    layout = Layout(groups, transposed)
    return layout.kernel(nearest_orthogonal(layout.matrix(parameter.grad.detach()), solver=solver), parameter)
