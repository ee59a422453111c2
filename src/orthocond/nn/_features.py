"""Sums, products and linear maps over the samples of a feature map, in the memory layout that it has.

A feature map ``(N, C, *)`` holds a sample for each position of each image. Stored plane by plane (contiguous) it is
a batch of matrices ``C x L``; stored sample by sample (channels last, or ``(N, C)``) it is one matrix ``M x C``. Both
are views: nothing is transposed or copied.

On a CPU the features are taken a few images at a time, as many as its cache holds, and everything that is to be done
with them is done before they leave it: the memory is read once where it would be read two or three times.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from orthocond.linalg._covariance import sum_of_products

__all__ = ["Features", "features"]

_SHORT, _LONG = 256, 4096
"""With as many positions, an image is worth a product of its own."""

_PIECE = 2**20
"""How many numbers are taken at a time: 4 MiB of float32, which is in the cache when they are needed again."""


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
    def moments(self, other: Self) -> tuple[Tensor, Tensor]:
        """Return the sums of ``x`` and of ``x y^T`` over the samples ``x``, and ``y`` of ``other``."""

    @abstractmethod
    def map(self, weight: Tensor, bias: Tensor) -> Self:
        """Return ``weight x + bias`` for every sample, from ``(groups, c, c)`` and ``(groups, c)``."""

    @abstractmethod
    def map_sum(self, bias: Tensor, *terms: tuple[Tensor, Self]) -> Self:
        """Return ``weight x + ... + bias`` for every sample, over the terms ``weight, x``; it has no graph."""

    @abstractmethod
    def shifted(self, mean: Tensor) -> Self:
        """Return a copy with ``mean`` subtracted."""

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the images that are taken together, by first and last plus one."""
        images = self.shape[0]
        step = images
        if self.matrices.device.type == "cpu":
            step = max(1, _PIECE * images // max(1, self.matrices.numel()))
        return ((start, min(start + step, images)) for start in range(0, images, max(1, step)))


class _Planes(Features):
    """Matrices ``(N * groups, c, L)``."""

    @classmethod
    def view(cls, x: Tensor, groups: int) -> Self:
        return cls(x.reshape(x.shape[0] * groups, x.shape[1] // groups, math.prod(x.shape[2:])), x.shape, groups)

    def tensor(self) -> Tensor:
        return self.matrices.view(self.shape)

    def moments(self, other: Self) -> tuple[Tensor, Tensor]:
        sums, products = [], []
        for x, y in zip(self._by_piece(), other._by_piece(), strict=True):
            sums.append(x.sum(-1).unflatten(0, (-1, self.groups)).sum(0))
            products.append(sum_of_products(x, y).unflatten(0, (-1, self.groups)).sum(0))
        return _total(sums), _total(products)

    def map(self, weight: Tensor, bias: Tensor) -> Self:
        weight, bias = (self._repeated(each, self.shape[0]) for each in (weight, bias.unsqueeze(-1)))
        return self._like(torch.baddbmm(bias, weight, self.matrices))

    def map_sum(self, bias: Tensor, *terms: tuple[Tensor, Self]) -> Self:
        result = self._like(torch.empty_like(self.matrices))
        for out, *pieces in zip(result._by_piece(), *(x._by_piece() for _, x in terms), strict=True):
            for i, ((weight, _), x) in enumerate(zip(terms, pieces, strict=True)):
                weights = self._repeated(weight, out.shape[0] // self.groups)
                _ = out.baddbmm_(weights, x) if i else torch.bmm(weights, x, out=out)
            out.unflatten(0, (-1, self.groups)).add_(bias.unsqueeze(-1))
        return result

    def shifted(self, mean: Tensor) -> Self:
        return self._like(self.matrices - self._repeated(mean.unsqueeze(-1), self.shape[0]))

    def _by_piece(self) -> Iterator[Tensor]:
        return (self.matrices[start * self.groups : end * self.groups] for start, end in self._pieces())

    def _repeated(self, statistic: Tensor, times: int) -> Tensor:
        if self.groups == 1:
            return statistic.expand(times, *statistic.shape[1:])
        return statistic.repeat(times, 1, 1)

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

    def moments(self, other: Self) -> tuple[Tensor, Tensor]:
        sums, products = [], []
        for x, y in zip(self._by_piece(), other._by_piece(), strict=True):
            sums.append(x.sum(1))
            products.append(sum_of_products(x.mT, y.mT, longest=self._longest()))
        return _total(sums), _total(products)

    def _longest(self) -> int:
        """Return how many samples a product has: image by image, shorter sums are faster, too, than one long one."""
        positions = math.prod(self.shape[2:])
        return positions if _SHORT <= positions <= _LONG else _LONG

    def map(self, weight: Tensor, bias: Tensor) -> Self:
        return self._like(torch.baddbmm(bias.unsqueeze(1), self.matrices, weight.mT))

    def map_sum(self, bias: Tensor, *terms: tuple[Tensor, Self]) -> Self:
        groups, rows, size = self.matrices.shape
        result = self._like(self.matrices.new_empty(rows, groups, size).transpose(0, 1))
        for out, *pieces in zip(result._by_piece(), *(x._by_piece() for _, x in terms), strict=True):
            for i, ((weight, _), x) in enumerate(zip(terms, pieces, strict=True)):
                _ = out.baddbmm_(x, weight.mT) if i else torch.bmm(x, weight.mT, out=out)
            out.add_(bias.unsqueeze(1))
        return result

    def shifted(self, mean: Tensor) -> Self:
        return self._like(self.matrices - mean.unsqueeze(1))

    def _by_piece(self) -> Iterator[Tensor]:
        positions = math.prod(self.shape[2:])
        return (self.matrices[:, start * positions : end * positions] for start, end in self._pieces())

    def _like(self, matrices: Tensor) -> Self:
        return type(self)(matrices, self.shape, self.groups)


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
