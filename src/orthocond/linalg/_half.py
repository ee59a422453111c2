"""Products of float32 matrices by products of half types with float32 sums, as accurate as in float32.

An iteration by products is not self-correcting here: what a step rounds off is no function of ``P`` any more, and the
later steps keep it. By plain half products the projector has an error of 1e-3 (float16) or 1e-2 (bfloat16). So each
matrix is a sum of terms of a half type: its rounding, that of what is left, and so on. Two terms of float16 hold
22 bits, three of bfloat16 24. The product is the sum of the products of terms, without those below the last bit: three
half products with float16, six with bfloat16. Their operands are half types, their sums are float32.

Reference: Ootomo, Yokota, Recovering single precision accuracy from Tensor Cores, arXiv 2203.03341 (2022).
"""

import torch
from torch import Tensor

__all__ = ["PRECISIONS", "added", "product"]

PRECISIONS = {"float32": (torch.float32, 1, 0), "float16": (torch.float16, 2, 11), "bfloat16": (torch.bfloat16, 3, 8)}
"""Name of a precision -> its dtype, the number of terms, and the bits of each."""


def product(A: Tensor, B: Tensor, precision: str = "float32") -> Tensor:
    """Return ``A B`` for matrices ``(b, n, n)``; those in another type than float32 are multiplied as they are.

    Example:
        >>> A = torch.rand(1, 8, 8)
        >>> bool((product(A, A, "float16") - A @ A).abs().max() < 1e-6)
        True
    """
    if precision == "float32" or A.dtype != torch.float32:
        return A @ B
    dtype, num_terms, bits = PRECISIONS[precision]
    left = _terms(A, dtype, num_terms, bits)
    right = left if B is A else _terms(B, dtype, num_terms, bits)
    total = torch.zeros_like(A)
    for order in reversed(range(num_terms)):  # the small ones first
        parts = [_half_product(left[k], right[order - k]) for k in range(order + 1)]
        total = total + sum(parts[1:], parts[0]) * 2.0 ** (-bits * order)
    return total


def added(
    C: Tensor, A: Tensor, B: Tensor, precision: str = "float32", *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return ``beta C + alpha A B``."""
    if precision == "float32" or A.dtype != torch.float32:
        return torch.baddbmm(C, A, B, beta=beta, alpha=alpha)
    return beta * C + alpha * product(A, B, precision)


def _terms(A: Tensor, dtype: torch.dtype, number: int, bits: int) -> list[Tensor]:
    """Return terms whose sum is ``A``, the k-th multiplied by ``2^(bits k)``, since float16 has few exponents."""
    terms, rest = [], A
    for _ in range(number):
        terms.append(rest.to(dtype))
        rest = (rest - terms[-1].to(A.dtype)) * 2.0**bits
    return terms


def _half_product(A: Tensor, B: Tensor) -> Tensor:
    """Return the product of half types in float32; where there is no such operator, of the same numbers in float32."""
    if A.is_cuda:
        return torch.bmm(A, B, out_dtype=torch.float32)
    return A.float() @ B.float()
