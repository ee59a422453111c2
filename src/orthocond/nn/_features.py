"""Sums, products and linear maps over the samples of a feature map, in the memory layout that it has.

A feature map ``(N, C, *)`` holds a sample for each position of each image. Stored plane by plane (contiguous) it is
a batch of matrices ``C x L``; stored sample by sample (channels last, or ``(N, C)``) it is one matrix ``M x C``. Both
are views: nothing is transposed or copied.
"""

import math
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from orthocond.linalg._covariance import sum_of_products

__all__ = ["Features", "features"]

_SHORT, _LONG = 256, 4096
"""With as many positions, an image is worth a product of its own."""


def features(x: Tensor, groups: int) -> "Features":
    """Return the samples of ``x`` ``(N, C, *)``, the channels in ``groups`` of ``c = C / groups``."""
    by_plane = x.is_contiguous() and math.prod(x.shape[2:]) > 1
    return _Planes.view(x, groups) if by_plane else _Rows.view(x, groups)


class Features(ABC):
    """The samples of a feature map; statistics are ``(groups, c)`` and ``(groups, c, c)``."""

    def __init__(self, matrices: Tensor, shape: torch.Size, groups: int) -> None:
        self.matrices, self.shape, self.groups = matrices, shape, groups
        self.num_samples = shape[0] * math.prod(shape[2:])

    @classmethod
    @abstractmethod
    def view(cls, x: Tensor, groups: int) -> Self:
        """Return the samples of ``x``, copied only where its memory is neither layout."""

    @abstractmethod
    def tensor(self) -> Tensor:
        """Return the samples as a tensor ``(N, C, *)``."""

    @abstractmethod
    def sum(self) -> Tensor:
        """Return the sum of the samples."""

    @abstractmethod
    def product(self, other: Self) -> Tensor:
        """Return the sum of ``x y^T`` over the samples."""

    @abstractmethod
    def map(self, weight: Tensor, bias: Tensor) -> Self:
        """Return ``weight x + bias`` for every sample, from ``(groups, c, c)`` and ``(groups, c)``."""

    @abstractmethod
    def add_map_(self, weight: Tensor, other: Self) -> Self:
        """Add ``weight y`` for every sample ``y`` of ``other``, in place."""

    @abstractmethod
    def shifted(self, mean: Tensor) -> Self:
        """Return a copy with ``mean`` subtracted."""


class _Planes(Features):
    """Matrices ``(N * groups, c, L)``."""

    @classmethod
    def view(cls, x: Tensor, groups: int) -> Self:
        return cls(x.reshape(x.shape[0] * groups, x.shape[1] // groups, math.prod(x.shape[2:])), x.shape, groups)

    def tensor(self) -> Tensor:
        return self.matrices.view(self.shape)

    def sum(self) -> Tensor:
        # One dimension after the other, which is twice as fast as both at once.
        return self.matrices.sum(-1).view(self.shape[0], self.groups, -1).sum(0)

    def product(self, other: Self) -> Tensor:
        products = sum_of_products(self.matrices, other.matrices)
        return products.view(self.shape[0], self.groups, *products.shape[1:]).sum(0)

    def map(self, weight: Tensor, bias: Tensor) -> Self:
        bias = self._repeated(bias.unsqueeze(-1))
        return self._like(torch.baddbmm(bias, self._repeated(weight), self.matrices))

    def add_map_(self, weight: Tensor, other: Self) -> Self:
        self.matrices.baddbmm_(self._repeated(weight), other.matrices)
        return self

    def shifted(self, mean: Tensor) -> Self:
        return self._like(self.matrices - self._repeated(mean.unsqueeze(-1)))

    def _repeated(self, statistic: Tensor) -> Tensor:
        if self.groups == 1:
            return statistic.expand(self.shape[0], *statistic.shape[1:])
        return statistic.repeat(self.shape[0], 1, 1)

    def _like(self, matrices: Tensor) -> Self:
        return type(self)(matrices, self.shape, self.groups)


class _Rows(Features):
    """Matrices ``(groups, M, c)``."""

    @classmethod
    def view(cls, x: Tensor, groups: int) -> Self:
        rows = x.movedim(1, -1).reshape(x.shape[0] * math.prod(x.shape[2:]), groups, x.shape[1] // groups)
        return cls(rows.transpose(0, 1), x.shape, groups)

    def tensor(self) -> Tensor:
        rows = self.matrices.transpose(0, 1).reshape(self.shape[0], *self.shape[2:], self.shape[1])
        return rows.movedim(-1, 1)

    def sum(self) -> Tensor:
        return self.matrices.sum(1)

    def product(self, other: Self) -> Tensor:
        positions = math.prod(self.shape[2:])
        # Image by image: shorter sums are faster and more accurate than one long one.
        longest = positions if _SHORT <= positions <= _LONG else _LONG
        return sum_of_products(self.matrices.mT, other.matrices.mT, longest=longest)

    def map(self, weight: Tensor, bias: Tensor) -> Self:
        return self._like(torch.baddbmm(bias.unsqueeze(1), self.matrices, weight.mT))

    def add_map_(self, weight: Tensor, other: Self) -> Self:
        self.matrices.baddbmm_(other.matrices, weight.mT)
        return self

    def shifted(self, mean: Tensor) -> Self:
        return self._like(self.matrices - mean.unsqueeze(1))

    def _like(self, matrices: Tensor) -> Self:
        return type(self)(matrices, self.shape, self.groups)
