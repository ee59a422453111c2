"""The spectral norm."""

from typing import TYPE_CHECKING

from torch.nn.utils.parametrizations import spectral_norm

from orthocond.treatments._part import Part

if TYPE_CHECKING:
    from orthocond.treatments._target import Target

__all__ = ["SpectralNorm"]


class SpectralNorm(Part):
    r"""Divides the weight by its largest singular value, :math:`W / \sigma_{max}(W)`.

    Example:
        >>> SpectralNorm()
        sn
    """

    name = "sn"
    description = "Spectral norm: the weight is divided by its largest singular value, W / sigma_max(W)."
    reference = "Miyato et al., ICLR 2018; Song, Sebe, Wang 2022, eq. 11"
    acts_on = "weight"
    order = 20  # after ow: it divides what the layer uses
    replaces_weight = True

    def install(self, target: "Target") -> None:
        """Add torch's parametrization to the weight."""
        spectral_norm(target.layer, "weight")
