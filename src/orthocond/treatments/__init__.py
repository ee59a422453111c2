"""The treatments of the Pre-SVD layer: a class for each, their registry, and how they are applied to a model.

A treatment is a set of parts, written as names joined by ``+`` in any order, each with its options in parentheses:
``"nog(solver=svd)+ow+olr"``; ``none`` is the empty one. It acts on one layer, and nothing else changes.
"""

from orthocond._core.options import parsed_choice, split_outside
from orthocond.graph import find_pre_svd
from orthocond.treatments._group import TreatmentGroup
from orthocond.treatments._host import Treatment
from orthocond.treatments._nog import NearestOrthogonalGradient
from orthocond.treatments._ol import OrthogonalLoss
from orthocond.treatments._olr import OptimalLearningRate
from orthocond.treatments._ow import OrthogonalWeight
from orthocond.treatments._part import NOTE_KINDS, Note, Part
from orthocond.treatments._registry import TREATMENTS
from orthocond.treatments._sn import SpectralNorm
from orthocond.treatments._spec import canonical, canonical_order, parse
from orthocond.treatments._step import LastStep, Step
from orthocond.treatments._target import Target
from orthocond.treatments._treat import treat
from orthocond.treatments.gauge import METRICS, Gauge

__all__ = [
    "METRICS",
    "NOTE_KINDS",
    "TREATMENTS",
    "Gauge",
    "LastStep",
    "NearestOrthogonalGradient",
    "Note",
    "OptimalLearningRate",
    "OrthogonalLoss",
    "OrthogonalWeight",
    "Part",
    "SpectralNorm",
    "Step",
    "Target",
    "Treatment",
    "TreatmentGroup",
    "canonical",
    "canonical_order",
    "find_pre_svd",
    "parse",
    "parsed_choice",
    "split_outside",
    "treat",
]
