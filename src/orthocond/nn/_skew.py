"""The skew orthogonal convolution: orthogonal as a map of images."""

import math
from typing import Self

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # documented, missing from the stubs

from orthocond._core.compiling import uncompiled
from orthocond._core.precision import widen
from orthocond._core.private import is_exporting
from orthocond.errors import ArgumentError, NonFiniteError

__all__ = ["SkewOrthogonalConv2d"]


class SkewOrthogonalConv2d(nn.Conv2d):
    r"""A convolution that preserves the norm of images: the exponential of a skew-symmetric convolution.

    From the kernel :math:`M` that is trained, :math:`L = M - M^T` (channels exchanged, taps reversed) is a
    skew-symmetric map of images with :math:`C = \max(in \cdot s^2, out)` channels, so

    .. math:: \exp(L) x = x + L x + \tfrac{1}{2} L^2 x + \dots

    is orthogonal. Missing input channels are zeros, excess output channels are dropped, and a stride
    :math:`s` first moves the pixels of ``s x s`` blocks into channels. With at least as many output channels as (moved)
    input channels the norm is preserved exactly; with fewer it can only fall.

    It is summed as the Chebyshev series on the spectrum, an interval of the imaginary axis: with :math:`\|L\| \le b`,
    an integer, and Bessel functions :math:`J_k`,

    .. math:: \exp(L) x = J_0(b) x + 2 \sum_{k=1}^{K} J_k(b) u_k, \quad u_{k+1} = \tfrac{2}{b} L u_k + u_{k-1}

    from :math:`u_0 = x`, :math:`u_1 = L x / b`. The truncation error is below ``tolerance`` times the norm of the
    input. With the default, 3e-8, that takes 8 convolutions for :math:`b = 1`, and about :math:`b + 10` for a larger
    bound; with 1e-3 it takes 4 for :math:`b = 1`. The first convolution acts on the input's channels only. No term is
    larger than the input, so nothing cancels. The bound depends on the data: `torch.compile` breaks the graph there
    unless the kernel is normalised, and `torch.export` uses the bound of the last call, which is saved with the state.

    Reference:
        Singla and Feizi, Skew orthogonal convolutions, ICML 2021; the bound: Singla and Feizi, Fantastic four: bounds
        on the singular values of convolution layers, ICLR 2021; the series: Tal-Ezer and Kosloff, J. Chem. Phys. 81
        (1984) 3967.
    """

    normalize = False
    """Whether the kernel is scaled down to a norm of at most 1, by its bound."""
    norm_bound = 4
    """Upper bound of the kernel's norm as a map of images."""
    tolerance = 1 / math.factorial(11)
    """Upper bound of the truncation error, as a fraction of the input's norm."""

    @classmethod
    def take_over(
        cls, module: nn.Module, name: str = "weight", *, normalize: bool, tolerance: float | None = None
    ) -> Self:
        """Turn a plain convolution into a skew orthogonal one, in place, with a fresh kernel.

        Raises:
            ArgumentError: it is not an ``nn.Conv2d`` that maps an image to one of the same size (over the stride), or
                the tolerance is not between 0 and 0.1.
        """
        if tolerance is not None and not 0 < tolerance <= 0.1:
            raise ArgumentError(f"kind='operator' expected 0 < tolerance <= 0.1, got {tolerance}; 1e-3 is fast.")
        if type(module) is not nn.Conv2d or name != "weight":
            raise ArgumentError(
                f"kind='operator' expected the weight of an nn.Conv2d, got {type(module).__name__}.{name}."
            )
        size, stride = module.kernel_size, module.stride
        odd_and_same = all(k % 2 and p == k // 2 for k, p in zip(size, _padding(module), strict=True))
        can_turn = module.padding_mode in ("zeros", "circular") and module.groups == 1 and set(module.dilation) == {1}
        if not odd_and_same or not can_turn or stride[0] != stride[1]:
            raise ArgumentError(
                "kind='operator' expected an odd kernel with padding k // 2 of zeros or circular, equal strides, no "
                f"groups and no dilation, got {module}; use kind='kernel'."
            )
        channels = max(module.in_channels * stride[0] ** 2, module.out_channels)
        weight = module.weight.new_empty(channels, channels, *size)
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        module.__class__ = cls
        assert isinstance(module, cls)
        module.normalize = normalize
        if tolerance is not None:
            module.tolerance = tolerance
        return module

    def forward(self, x: Tensor) -> Tensor:
        """Return the image ``(N, out, H / s, W / s)`` of ``x`` ``(N, in, H, W)``."""
        stride = self.stride[0]
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ArgumentError(f"expected images (N, {self.in_channels}, H, W), got {tuple(x.shape)}.")
        if x.shape[-1] % stride or x.shape[-2] % stride:
            raise ArgumentError(f"an orthogonal stride of {stride} expected images it divides, got {tuple(x.shape)}.")
        x = nn.functional.pixel_unshuffle(x, stride) if stride > 1 else x
        kernel = self.weight - self.weight.flip(-1, -2).transpose(0, 1)
        if self.normalize:
            kernel = kernel / _norm_bound(kernel).to(kernel)
            self.norm_bound = 1
        elif not is_exporting():
            self.norm_bound = _whole_bound(kernel.detach())
        x = self._exponential(x, kernel / self.norm_bound)
        return x if self.bias is None else x + self.bias.view(-1, 1, 1)

    def _exponential(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the exponential of the kernel times its bound, applied to images of as many channels or fewer.

        By Clenshaw's recurrence: with ``c_0 = J_0(b)``, ``c_k = 2 J_k(b)``, downwards from ``b_K = c_K x``,
        ``b_k = c_k x + (2 / b) L b_(k+1) + b_(k+2)``; the sum of the series is ``c_0 x + L b_1 / b + b_2``.
        """
        first, *others, before_last, last = _coefficients(self.norm_bound, self.tolerance)
        twice = 2 * kernel
        padded = nn.functional.pad(x, (0, 0, 0, 0, 0, len(kernel) - x.shape[1]))
        # b_K and b_(K-1): the input's channels suffice for the convolution of the first.
        later = last * padded
        term = torch.add(self._convolve(x, last * twice[:, : x.shape[1]]), padded, alpha=before_last)
        for coefficient in reversed(others):
            # Not in place: under autocast a convolution is of a half type, and the sum is not.
            term, later = (self._convolve(term, twice) + later).add_(padded, alpha=coefficient), term
        channels = self.out_channels
        return (self._convolve(term, kernel[:channels]) + later[:, :channels]).add_(padded[:, :channels], alpha=first)

    def extra_repr(self) -> str:
        """Return what differs from other convolutions."""
        return f"{super().extra_repr()}, normalize={self.normalize}, tolerance={self.tolerance:.1g}"

    def get_extra_state(self) -> dict[str, int]:
        """Return the part of the state that is not a tensor."""
        return {"norm_bound": self.norm_bound}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Restore the part of the state that is not a tensor; version 0.1 called the same number ``num_repeats``."""
        self.norm_bound = state["norm_bound"] if "norm_bound" in state else state["num_repeats"]

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        padding = _padding(self)
        if self.padding_mode != "zeros":
            x = nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]), mode=self.padding_mode)
            padding = (0, 0)
        return nn.functional.conv2d(x, kernel.to(x), padding=padding)


def _padding(module: nn.Conv2d) -> tuple[int, ...]:
    return tuple(k // 2 for k in module.kernel_size) if module.padding == "same" else tuple(module.padding)  # type: ignore[arg-type]


_NOT_FINITE = "the kernel of an orthogonal convolution holds NaN or infinity; lower the learning rate."


@uncompiled
def _whole_bound(kernel: Tensor) -> int:
    bound = float(_norm_bound(kernel))
    if not math.isfinite(bound):
        raise NonFiniteError(_NOT_FINITE)
    return math.ceil(bound)


def _coefficients(bound: int, tolerance: float) -> tuple[float, ...]:
    """Return ``J_0(b), 2 J_1(b), ..., 2 J_K(b)``, at least three, where the rest sums to less than the tolerance.

    By the recurrence ``J_(k-1) = (2 k / b) J_k - J_(k+1)`` downwards from where they vanish, normalised by
    ``J_0 + 2 J_2 + 2 J_4 + ... = 1`` (Miller's algorithm).
    """
    start = 2 * (bound + 20 + int(4 * bound ** (1 / 3)) // 2)
    values = [0.0] * (start + 2)
    values[start] = 1.0
    for k in range(start, 0, -1):
        values[k - 1] = 2 * k / bound * values[k] - values[k + 1]
        if abs(values[k - 1]) > 1e200:
            values = [value * 1e-200 for value in values]
    total = values[0] + 2 * sum(values[2::2])
    doubled = [2 * value / total for value in values]
    num_terms = len(doubled)
    while num_terms > 3 and sum(map(abs, doubled[num_terms - 1 :])) < tolerance:
        num_terms -= 1
    return doubled[0] / 2, *doubled[1:num_terms]


def _norm_bound(kernel: Tensor) -> Tensor:
    """Return an upper bound of the convolution's norm, at least 1, from ``(out, in * k)`` and the number of taps."""
    matrix = widen(kernel.flatten(1))
    try:
        norm: Tensor = torch.linalg.matrix_norm(matrix @ matrix.mT, ord=2)
    except LinAlgError:
        raise NonFiniteError(_NOT_FINITE) from None
    return (kernel[0, 0].numel() * norm).clamp(min=1.0).sqrt()
