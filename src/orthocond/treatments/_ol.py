"""The orthogonal loss."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orthocond.errors import check_nonnegative
from orthocond.nn import orthogonal_loss
from orthocond.treatments._part import Part

if TYPE_CHECKING:
    from orthocond.treatments._target import Target

__all__ = ["OrthogonalLoss"]


class OrthogonalLoss(Part):
    r"""Adds :math:`\|W W^T - I\|_F` to the loss, summed over the groups of a convolution.

    Args:
        penalty_weight: factor in front of it.

    Example:
        >>> OrthogonalLoss(penalty_weight=0.5)
        ol(penalty_weight=0.5)
    """

    name = "ol"
    description = "Orthogonal loss: ||W W^T - I||_F is added to the loss."
    reference = "Wang et al., CVPR 2020; Song, Sebe, Wang 2022, eq. 12"
    acts_on = "loss"

    def __init__(self, *, penalty_weight: float = 1.0) -> None:
        check_nonnegative(penalty_weight, "penalty_weight", "ol")
        self.penalty_weight = penalty_weight

    def penalty(self, target: "Target") -> Tensor:
        """Return the weighted loss."""
        matrix = target.weight
        losses = [orthogonal_loss(group) for group in (matrix if matrix.ndim == 3 else [matrix])]
        total: Tensor = self.penalty_weight * torch.stack(losses).sum()
        return total
