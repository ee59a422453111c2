"""The orthogonal weight."""

from typing import TYPE_CHECKING

from orthocond.errors import check_choice
from orthocond.nn import KINDS, orthogonal_weight
from orthocond.treatments._part import Part

if TYPE_CHECKING:
    from orthocond.treatments._target import Target

__all__ = ["OrthogonalWeight"]


class OrthogonalWeight(Part):
    r"""Uses :math:`\exp(W - W^T)` as the weight, which is orthogonal throughout training.

    Args:
        kind: one of `orthocond.nn.KINDS`: the flattened kernel is orthogonal, or the convolution as a map of images.
        normalize: bound the exponent. The paper's formula has no bound and trains worse with ``nog``: see
            docs/orthogonal_weight.md.
        tolerance: truncation error of the operator's series, as a fraction of the input's norm; None for 3e-8. With
            1e-3 the operator takes half as many convolutions.

    Example:
        >>> OrthogonalWeight(kind="operator")
        ow(kind=operator)
    """

    name = "ow"
    description = "Orthogonal weight: exp(W - W^T) is used as the weight."
    reference = "Singla and Feizi, ICML 2021; Song, Sebe, Wang 2022, eq. 13"
    acts_on = "weight"
    order = 10
    replaces_weight = True

    def __init__(self, *, kind: str = "kernel", normalize: bool = True, tolerance: float | None = None) -> None:
        check_choice(kind, KINDS, "kind", "ow")
        self.kind, self.normalize, self.tolerance = kind, normalize, tolerance

    def install(self, target: "Target") -> None:
        """Add the parametrization to the weight, or turn the convolution into a skew orthogonal one."""
        orthogonal_weight(target.layer, kind=self.kind, normalize=self.normalize, tolerance=self.tolerance)
