"""Layers that compute roots of covariances, orthogonal weights, conversion from BatchNorm, and folding for inference.

The meta-layers (`DecorrelatedBatchNorm1d`, `DecorrelatedBatchNorm2d`, `DecorrelatedBatchNorm3d`, `CovariancePool2d`,
`WhiteningColoring2d`) keep the eigenvalues of their last training batch as ``last_eigenvalues``.
"""

from orthocond.nn._coloring import WhiteningColoring2d, whiten_color
from orthocond.nn._convert import convert_batchnorm
from orthocond.nn._fold import fold
from orthocond.nn._frechet import FrechetLoss
from orthocond.nn._meta import MetaLayer
from orthocond.nn._norm import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d
from orthocond.nn._orthogonal import KINDS, is_orthogonal, orthogonal_loss, orthogonal_weight
from orthocond.nn._pool import CovariancePool2d
from orthocond.nn._renew import renew_statistics
from orthocond.nn._rotation import RotationHead

__all__ = [
    "KINDS",
    "CovariancePool2d",
    "DecorrelatedBatchNorm1d",
    "DecorrelatedBatchNorm2d",
    "DecorrelatedBatchNorm3d",
    "FrechetLoss",
    "MetaLayer",
    "RotationHead",
    "WhiteningColoring2d",
    "convert_batchnorm",
    "fold",
    "is_orthogonal",
    "orthogonal_loss",
    "orthogonal_weight",
    "renew_statistics",
    "whiten_color",
]
