"""The treatments by name."""

from collections.abc import Mapping
from types import MappingProxyType

from orthocond.treatments._nog import NearestOrthogonalGradient
from orthocond.treatments._ol import OrthogonalLoss
from orthocond.treatments._olr import OptimalLearningRate
from orthocond.treatments._ow import OrthogonalWeight
from orthocond.treatments._part import Part
from orthocond.treatments._sn import SpectralNorm
from orthocond.treatments.gauge import Gauge

__all__ = ["TREATMENTS"]

# In the order of the paper's tables, which is that of a specification's canonical spelling.
_PARTS: dict[str, type[Part]] = {
    part.name: part
    for part in (
        NearestOrthogonalGradient,
        SpectralNorm,
        OrthogonalLoss,
        OrthogonalWeight,
        OptimalLearningRate,
        Gauge,
    )
}

TREATMENTS: Mapping[str, type[Part]] = MappingProxyType(_PARTS)
"""The treatments by name, in the order in which a specification is spelled.

Example:
    >>> {name: part.acts_on for name, part in TREATMENTS.items()}
    {'nog': 'gradient', 'sn': 'weight', 'ol': 'loss', 'ow': 'weight', 'olr': 'learning rate', 'gauge': 'weight'}
"""
