"""``bench layers``: whitening against batch norm, covariance against average pooling, orthogonal against plain weights.

The reference of every ratio is the plain layer in the same round: `torch.nn.BatchNorm2d` of the same memory layout, a
convolution alone, average pooling, `torch.nn.utils.parametrizations.orthogonal`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from orthocond.lab.bench.measure import (
    Budget,
    Contestant,
    alternate,
    forward_backward,
    num_operations,
    once,
    saved_bytes,
    spread,
)
from orthocond.lab.bench.peers import orthogonal_parametrizations
from orthocond.linalg import covariance, matrix_sqrth
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm2d, fold, is_orthogonal, orthogonal_weight

__all__ = ["Cell", "UsualWhitening", "cells", "measure"]

_POOLED = [(32, 128, 14, 14), (32, 256, 14, 14), (32, 256, 7, 7), (8, 512, 7, 7)]
_BY_PRODUCTS = [((64, 16, 32, 32), 1), ((64, 64, 32, 32), 1), ((64, 64, 32, 32), 4), ((32, 256, 16, 16), 1),
                ((32, 256, 16, 16), 4)]  # fmt: skip
_LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


@dataclass(frozen=True)
class Cell:
    """What is compared, on which shape."""

    subject: str
    """``"norm"``, ``"products"``, ``"folded"``, ``"pool"``, ``"operator"`` or ``"weight"``."""
    shape: tuple[int, ...]
    layout: str = "contiguous"
    mode: str = "training"
    """``"training"`` is forward and backward; ``"eval"`` is forward, without gradients."""
    groups: int = 1
    """Groups of channels that are whitened apart."""


def cells(*, quick: bool) -> Iterator[Cell]:
    """Yield the comparisons."""
    for shape in [(4, 16, 8, 8)] if quick else [(64, 64, 32, 32), (128, 64, 32, 32)]:
        for layout in _LAYOUTS:
            yield from (Cell("norm", shape, layout, mode) for mode in ("training", "eval"))
    for shape, groups in [((4, 16, 8, 8), 1), ((4, 16, 8, 8), 2)] if quick else _BY_PRODUCTS:
        yield Cell("products", shape, groups=groups)
    yield from (Cell("folded", (2, 16, 8, 8) if quick else (32, 64, 32, 32), layout, "eval") for layout in _LAYOUTS)
    # With fewer positions than channels, as in the paper's ImageNet head, the positions are the smaller side.
    for pooled in [(2, 16, 8, 8), (2, 16, 3, 3)] if quick else _POOLED:
        yield from (Cell("pool", pooled, mode=mode) for mode in ("training", "eval"))
    yield Cell("operator", (2, 3, 8, 8) if quick else (32, 3, 32, 32))
    for weight in [(16, 8)] if quick else [(64, 27), (256, 256), (256, 576)]:
        yield from (Cell("weight", weight, mode=mode) for mode in ("training", "eval"))


def measure(cell: Cell, *, quick: bool) -> list[dict[str, Any]]:
    """Return a record for each contestant; the first of them is the reference."""
    torch.manual_seed(0)
    makers = {"norm": _norms, "products": _by_products, "folded": _folded, "pool": _pools, "operator": _operators,
              "weight": _weights}  # fmt: skip
    records = makers[cell.subject](cell)
    # Whitening and batch norm are limited by the speed of the memory, which varies most.
    budget = Budget(0.0, fewest=3) if quick else Budget(10.0 if cell.subject == "norm" else 4.0, fewest=7, most=200)
    passes = alternate({name: entry.contestant for name, entry in records.items()}, budget)
    reference = next(iter(records))
    return [
        {
            "subject": cell.subject,
            "shape": list(cell.shape),
            "layout": cell.layout,
            "mode": cell.mode,
            "contestant": name,
            "reference": reference,
            "forward": spread(passes[name], passes[reference], part=0)._asdict(),
            "total": spread(passes[name], passes[reference])._asdict(),
            "saved": entry.saved,
            **entry.about,
        }
        for name, entry in records.items()
    ]


@dataclass(frozen=True)
class _Entry:
    contestant: Contestant
    saved: float | None
    """Bytes kept for the backward pass, relative to the input or, for orthogonal weights, to the weight."""
    about: dict[str, Any]


class UsualWhitening(nn.Module):
    """Whitening as it is usually written: transpose, centre, and autograd through ``eigh``."""

    running_mean: Tensor
    running_whitening: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features, 1))
        self.register_buffer("running_whitening", torch.eye(num_features))
        self.eps, self.momentum = eps, momentum

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` ``(N, C, H, W)`` whitened."""
        n, c, h, w = x.shape
        X = x.transpose(0, 1).contiguous().view(c, -1)
        if self.training:
            mean = X.mean(1, keepdim=True)
            centred = X - mean
            P = torch.mm(centred, centred.T) / X.shape[1] + self.eps * torch.eye(c, dtype=x.dtype, device=x.device)
            eigenvalues, U = torch.linalg.eigh(P)
            S = U @ torch.diag(eigenvalues.rsqrt()) @ U.T
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_whitening.lerp_(S, self.momentum)
        else:
            centred, S = X - self.running_mean, self.running_whitening
        y = torch.mm(S, centred).view(c, n, h, w).transpose(0, 1)
        return y * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def _norms(cell: Cell) -> dict[str, _Entry]:
    channels = cell.shape[1]
    layers = {
        "BatchNorm2d": nn.BatchNorm2d(channels),
        "DecorrelatedBatchNorm2d": DecorrelatedBatchNorm2d(channels),
        "the same, newton_schulz inside": DecorrelatedBatchNorm2d(channels, eps=1e-5, solver="newton_schulz"),
        "the same, products inside": DecorrelatedBatchNorm2d(channels, solver="products"),
        "whitening as usually written": UsualWhitening(channels),
    }
    return {name: _entry(layer, cell) for name, layer in layers.items()}


def _by_products(cell: Cell) -> dict[str, _Entry]:
    """Return whitening by eigh and by products, with the operations of a training step.

    The features are white up to their noise: the covariances have a gap, as behind gauge, and none is decomposed.
    """
    channels, entries = cell.shape[1], {}
    for name, solver in (
        ("eigh", "eigh"),
        ("products", "products"),
        ("products, float16 terms", "products(precision=float16)"),
        ("products, bfloat16 terms", "products(precision=bfloat16)"),
    ):
        entries[name] = _counted(DecorrelatedBatchNorm2d(channels, groups=cell.groups, solver=solver), cell)
    return entries


def _counted(layer: DecorrelatedBatchNorm2d, cell: Cell) -> _Entry:
    entry = _entry(layer, cell)
    counts = num_operations(lambda: list(entry.contestant()))
    about = {"groups": cell.groups, "channels": layer.num_features, **counts, "fallbacks": layer.num_fallbacks[0]}
    return _Entry(entry.contestant, entry.saved, about)


def _folded(cell: Cell) -> dict[str, _Entry]:
    channels = cell.shape[1]
    conv = nn.Conv2d(channels, channels, 3, padding=1)
    whitened = nn.Sequential(conv, DecorrelatedBatchNorm2d(channels))
    layers = {
        "convolution": conv,
        "convolution, DecorrelatedBatchNorm2d": whitened,
        "the same, folded": fold(whitened),
        "convolution, BatchNorm2d": nn.Sequential(conv, nn.BatchNorm2d(channels)),
    }
    return {name: _entry(layer, cell) for name, layer in layers.items()}


def _pools(cell: Cell) -> dict[str, _Entry]:
    layers = {
        "AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d(1),
        "CovariancePool2d": CovariancePool2d(),
        "the same, by the whole covariance": WholePool(),
        "the same, newton_schulz inside": CovariancePool2d(eps=1e-5, solver="newton_schulz"),
        "covariance as usually written, autograd through eigh": UsualPool(),
    }
    return {name: _entry(layer, cell) for name, layer in layers.items()}


class WholePool(nn.Module):
    """Covariance pooling by the root of the whole covariance, even where the positions are the smaller side."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the upper triangles of the roots of the covariances of ``x`` ``(N, C, H, W)``."""
        return _upper_triangle(matrix_sqrth(covariance(x.flatten(2))))


class UsualPool(nn.Module):
    """Covariance pooling as it is usually written: autograd through ``eigh``."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the upper triangles of the roots of the covariances of ``x`` ``(N, C, H, W)``."""
        X = x.flatten(2)
        X = X - X.mean(-1, keepdim=True)
        eigenvalues, U = torch.linalg.eigh(X @ X.mT / X.shape[-1])
        Q: Tensor = (U * (eigenvalues.clamp(min=0) + self.eps).sqrt().unsqueeze(-2)) @ U.mT
        return _upper_triangle(Q)


def _upper_triangle(Q: Tensor) -> Tensor:
    row, column = torch.triu_indices(Q.shape[-1], Q.shape[-1], device=Q.device)
    return Q[:, row, column]


def _operators(cell: Cell) -> dict[str, _Entry]:
    def convolution() -> nn.Module:
        return nn.Conv2d(cell.shape[1], 64, 3, padding=1)

    layers = {
        "convolution to 64 channels": convolution(),
        "orthogonal operator": orthogonal_weight(convolution(), kind="operator", normalize=False),
        "the same, normalised": orthogonal_weight(convolution(), kind="operator"),
        "normalised, tolerance 1e-3": orthogonal_weight(convolution(), kind="operator", tolerance=1e-3),
        "normalised, ten terms of the Taylor series": UsualOperator(cell.shape[1], 64),
    }
    return {name: _entry(layer, cell) for name, layer in layers.items()}


class UsualOperator(nn.Module):
    """The skew orthogonal convolution as it is usually written: a term of the Taylor series for each convolution."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.weight, self.bias = (
            nn.Parameter(torch.randn(channels, channels, 3, 3)),
            nn.Parameter(torch.zeros(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return images ``(N, channels, H, W)`` for ``x`` ``(N, in_channels, H, W)``."""
        kernel = self.weight - self.weight.flip(-1, -2).transpose(0, 1)
        kernel = kernel / (3 * torch.linalg.matrix_norm(kernel.flatten(1), ord=2))
        y = term = nn.functional.pad(x, (0, 0, 0, 0, 0, len(kernel) - self.in_channels))
        for k in range(1, 11):
            term = nn.functional.conv2d(term, kernel, padding=1) / k
            y = y + term
        return y + self.bias.view(-1, 1, 1)


def _entry(layer: nn.Module, cell: Cell) -> _Entry:
    """Return a layer on features, in training (forward and backward) or in eval."""
    x = torch.randn(cell.shape).to(memory_format=_LAYOUTS[cell.layout])
    layer.train(cell.mode == "training").to(memory_format=_LAYOUTS[cell.layout])  # type: ignore[call-overload]  # a stub that lacks it
    if cell.mode == "eval":
        return _Entry(once(_without_gradients(partial(layer, x))), None, {})
    y = layer(x)
    g = torch.randn_like(y)
    saved = saved_bytes(lambda: layer(x.clone().requires_grad_())) / x.nbytes
    return _Entry(forward_backward(layer, x, g, *layer.parameters()), saved, {})


def _weights(cell: Cell) -> dict[str, _Entry]:
    """Return contestants that compute an orthogonal weight (forward) and its gradient (backward)."""
    makers = {**orthogonal_parametrizations(), "orthogonal_weight": orthogonal_weight}
    entries = {}
    for name, make in makers.items():
        layer: Any = make(nn.Linear(cell.shape[1], cell.shape[0], bias=False)).train(cell.mode == "training")
        about = {"is_orthogonal": is_orthogonal(layer.weight)}
        if cell.mode == "eval":
            entries[name] = _Entry(once(_without_gradients(partial(getattr, layer, "weight"))), None, about)
        else:
            trained = list(layer.parameters())
            contestant = partial(_weight_pass, layer, trained, torch.randn(cell.shape))
            saved = saved_bytes(partial(getattr, layer, "weight")) / layer.weight.nbytes
            entries[name] = _Entry(contestant, saved, about)
    return entries


def _weight_pass(layer: Any, trained: list[nn.Parameter], g: Tensor) -> Iterator[None]:
    weight = layer.weight
    yield
    torch.autograd.grad(weight, trained, g)
    yield


def _without_gradients(function: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(function)
