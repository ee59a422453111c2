"""Sums, products and linear maps over the samples of a feature map, in the memory layout that it has.

A feature map ``(N, C, *)`` holds a sample for each position of each image. Stored plane by plane (contiguous) it is
a batch of matrices ``C x L``; stored sample by sample (channels last, or ``(N, C)``) it is one matrix ``M x C``. Both
are views: nothing is transposed or copied.

Where oneDNN is faster than MKL it multiplies image by image, or a few thousand samples at a time: it returns memory of
its own, which stays in the cache until it is copied to where it belongs.
"""

import math
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from orthocond._core.onednn import is_faster, linear
from orthocond.linalg._covariance import sum_of_products, symmetric_product

__all__ = ["Features", "features"]

_SHORT, _LONG = 256, 4096
"""With as many positions, an image is worth a product of its own."""
_MULTIPLICATIONS = 2**21
"""So many of them, some 20 us, are worth a call of their own."""
_IN_CACHE = 2**19
"""So many numbers stay in the cache, for each thread."""


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

    def map(self, weight: Tensor, bias: Tensor, other: tuple[Tensor, Self] | None = None) -> Self:
        """Return ``weight x + bias`` for every sample, from ``(groups, c, c)`` and ``(groups, c)``.

        With another weight and other samples ``y`` it is ``weight x + other_weight y + bias``.
        """
        inputs = [self.matrices] if other is None else [self.matrices, other[1].matrices]
        weights = weight if other is None else torch.cat([weight, other[0]], -1)
        if is_faster(*inputs, weights, bias) and self._is_worthwhile():
            return self._like(self._mapped_by_parts(weights, bias, inputs))
        return self._like(self._mapped(weight, bias, other))

    @abstractmethod
    def _is_worthwhile(self) -> bool:
        """Return whether the features are large enough to be taken part by part."""

    @abstractmethod
    def _mapped_by_parts(self, weights: Tensor, bias: Tensor, inputs: list[Tensor]) -> Tensor:
        """Return what `map` returns by oneDNN, in parts that stay in the cache; the weights side by side."""

    @abstractmethod
    def _mapped(self, weight: Tensor, bias: Tensor, other: tuple[Tensor, Self] | None) -> Tensor:
        """Return what `map` returns by products of whole batches."""

    @abstractmethod
    def shifted(self, mean: Tensor) -> Self:
        """Return a copy with ``mean`` subtracted."""

    def _like(self, matrices: Tensor) -> Self:
        return type(self)(matrices, self.shape, self.groups)


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
        X, Y = self.matrices, other.matrices
        if is_faster(X, Y) and self._is_worthwhile() and X.shape[-1] <= _LONG:
            products = torch.stack([linear(*pair) for pair in zip(X.unbind(), Y.unbind(), strict=True)])
        elif other is self:
            products = symmetric_product(X)
        else:
            products = sum_of_products(X, Y)
        return products.view(self.shape[0], self.groups, *products.shape[1:]).sum(0)

    def _is_worthwhile(self) -> bool:
        _, c, positions = self.matrices.shape
        # With more threads than one, MKL's take an image each, and oneDNN's have too little of one to share.
        return c * c * positions >= _MULTIPLICATIONS and torch.get_num_threads() == 1

    def _mapped_by_parts(self, weights: Tensor, bias: Tensor, inputs: list[Tensor]) -> Tensor:
        result = torch.empty_like(self.matrices)
        for i, filled in enumerate(result.unbind()):
            matrix = inputs[0][i] if len(inputs) == 1 else torch.cat([each[i] for each in inputs])
            group = i % self.groups
            torch.add(linear(weights[group], matrix.mT), bias[group].unsqueeze(-1), out=filled)
        return result

    def _mapped(self, weight: Tensor, bias: Tensor, other: tuple[Tensor, Self] | None) -> Tensor:
        bias = self._repeated(bias.unsqueeze(-1))
        result = torch.baddbmm(bias, self._repeated(weight), self.matrices)
        return result if other is None else result.baddbmm_(self._repeated(other[0]), other[1].matrices)

    def shifted(self, mean: Tensor) -> Self:
        return self._like(self.matrices - self._repeated(mean.unsqueeze(-1)))

    def _repeated(self, statistic: Tensor) -> Tensor:
        if self.groups == 1:
            return statistic.expand(self.shape[0], *statistic.shape[1:])
        return statistic.repeat(self.shape[0], 1, 1)


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
        if other is self:
            return symmetric_product(self.matrices.mT, longest=longest)
        return sum_of_products(self.matrices.mT, other.matrices.mT, longest=longest)

    def _is_worthwhile(self) -> bool:
        _, rows, c = self.matrices.shape
        return self.groups == 1 and rows * c * c >= _MULTIPLICATIONS

    def _mapped_by_parts(self, weights: Tensor, bias: Tensor, inputs: list[Tensor]) -> Tensor:
        result = torch.empty_like(self.matrices)
        size = _IN_CACHE * torch.get_num_threads() // self.matrices.shape[-1]
        for filled, *rows in zip(*(each[0].split(size) for each in (result, *inputs)), strict=True):
            filled.copy_(linear(rows[0] if len(rows) == 1 else torch.cat(rows, 1), weights[0], bias[0]))
        return result

    def _mapped(self, weight: Tensor, bias: Tensor, other: tuple[Tensor, Self] | None) -> Tensor:
        result = torch.baddbmm(bias.unsqueeze(1), self.matrices, weight.mT)
        return result if other is None else result.baddbmm_(other[1].matrices, other[0].mT)

    def shifted(self, mean: Tensor) -> Self:
        return self._like(self.matrices - mean.unsqueeze(1))
