"""Layers."""

from orthocond.nn._norm import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d
