"""Spectral functions by eigenvalues: a decomposition, a function of the eigenvalues, and exact derivatives.

With ``f(A)``, its derivative ``D1(A)[G]`` and its second derivative ``D2(A)[G, H]``, which is symmetric in ``G`` and
``H``: all three are symmetric operators, so a derivative and its adjoint are the same formula, and forward and reverse
mode share it. ``D3`` exists for the roots, see `_third_derivative`.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from orthocond._core.applying import applied, with_forward_mode
from orthocond._core.precision import at_least_float32, autocast_off, finite, narrow, real_dtype, widen
from orthocond._core.registry import resolve
from orthocond.errors import GradientError
from orthocond.linalg._decompose import check_finite, decompose
from orthocond.linalg._differences import Split, second_derivative, split, values
from orthocond.linalg._functions import INV_SQRT, SQRT, Chosen, is_clamped, spectral_function
from orthocond.linalg._gradients import GRADIENTS, differences

__all__ = [
    "ROOTS",
    "batched",
    "derivative",
    "eigen_derivatives",
    "eigen_functions",
    "eigen_vjp",
    "fit",
    "function_of",
    "noise_of",
    "product",
    "symmetric",
    "wide_symmetric",
]

# An asymmetry, or a negative eigenvalue, beyond this is more than the rounding of a covariance in the dtype. Matrices
# in float64 often come from float32.
_NOISE = {torch.float16: 0.03, torch.bfloat16: 0.09, torch.float32: 3e-4}

ROOTS = ((SQRT,), (INV_SQRT,), (SQRT, INV_SQRT))

Context = Any
Saved = tuple[Tensor | None, ...]


def eigen_functions(
    A: Tensor,
    functions: tuple[Chosen, ...],
    *,
    method: str,
    gradient: str,
    eps: float,
    rtol: float | None,
    floor: Tensor | None = None,
    wide: bool = True,
    stored: torch.dtype | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return ``f(A + eps I)`` for each of ``functions``, and the eigenvalues of ``A``, detached and ascending.

    A clamped function takes ``eps`` as a bound instead. ``rtol`` and ``floor`` say which eigenvalues are dropped, as in
    `split`. With ``wide`` the decomposition is in float64, otherwise in the dtype of ``A``, float32 at least; what
    follows from it is in float64 either way. ``stored`` is the dtype that ``A`` may have been rounded to before, if it
    isn't its own: what that explains is not warned of.
    """
    noise = noise_of(stored or A.dtype)
    with autocast_off(A.device):
        *results, eigenvalues, _ = applied(_Spectral, A, floor, functions, method, noise, wide, gradient, eps, rtol)
    return tuple(results), eigenvalues


def derivative(
    A: Tensor,
    G: Tensor,
    eigenvalues: Tensor,
    U: Tensor,
    function: Chosen,
    eps: float,
    rtol: float | None,
    floor: Tensor | None = None,
) -> Tensor:
    """Return the derivative of ``f(A + eps I)`` applied to ``G``, in float64, differentiable again."""
    with autocast_off(A.device):
        found: Tensor = applied(_Derivative, A, G, eigenvalues, U, floor, function, "exact", eps, rtol)
    return found


def eigen_vjp(A: Tensor, function: Chosen, G: Tensor, *, rtol: float) -> tuple[Tensor, Tensor]:
    """Return ``f(A)`` and its derivative applied to ``G``, both differentiable again."""
    value, eigenvalues, U = applied(
        _Spectral, A, None, (function,), "eigh", noise_of(A.dtype), True, "exact", 0.0, rtol
    )
    return value, applied(_Derivative, A, G, eigenvalues, U, None, function, "exact", 0.0, rtol)


def eigen_derivatives(
    A: Tensor, function: Chosen, G: Tensor, H: Tensor, *, eps: float, rtol: float | None, floor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``D1(A + eps I)[G]``, ``D1(A + eps I)[H]`` and ``D2(A + eps I)[G, H]``, all differentiable again."""
    _, eigenvalues, U = applied(_Spectral, A, floor, (function,), "eigh", noise_of(A.dtype), True, "exact", eps, rtol)
    first = (applied(_Derivative, A, each, eigenvalues, U, floor, function, "exact", eps, rtol) for each in (G, H))
    return *first, applied(_SecondDerivative, A, G, H, eigenvalues, U, floor, function, eps, rtol)


def function_of(U: Tensor, parts: Split, function: Chosen) -> Tensor:
    """Return the function of a matrix from eigenvectors and eigenvalues."""
    return product(U * values(parts, function).unsqueeze(-2), U.mH)


def product(P: Tensor, Q: Tensor) -> Tensor:
    """Return ``P Q``; for batches of small matrices ``@`` takes as long to prepare as to multiply."""
    return torch.bmm(P, Q) if P.ndim == Q.ndim == 3 and P.shape[0] == Q.shape[0] else P @ Q


def symmetric(A: Tensor) -> Tensor:
    """Return ``(A + A^H) / 2``, halved first so that nothing overflows."""
    half = A * 0.5
    return half + half.mH


def wide_symmetric(A: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the symmetric part of ``A`` in float64, and how far ``A`` is from it; None where they are equal.

    The distance is that of the largest entry of ``A - A^H``, relative to the largest of ``A``.
    """
    wide = widen(A)
    if not A.numel():
        return wide, None
    if A.is_cpu and not torch.compiler.is_compiling():
        if torch.equal(wide, wide.mH):
            return wide, None
        check_finite(wide)  # NaN is what differs from itself, and MKL would print complaints about it
    part = wide.lerp(wide.mT, 0.5) if A.dtype == torch.float32 else symmetric(wide)  # where nothing overflows
    if wide.is_meta:
        return part, None
    largest = wide.abs().amax((-2, -1))
    distance = (wide - part).abs().amax((-2, -1))
    return part, (2 * distance / torch.where(largest > 0, largest, 1.0)).amax()


def noise_of(dtype: torch.dtype) -> float:
    """Return the asymmetry, and the negative eigenvalue, that rounding in a dtype explains, relative to the largest."""
    return _NOISE.get(dtype, _NOISE[torch.float32])


def _parts(eigenvalues: Tensor, floor: Tensor | None, eps: float, rtol: float | None, function: Chosen) -> Split:
    return split(eigenvalues, eps, rtol, floor, function=function)


def fit(dtype: torch.dtype, functions: tuple[Chosen, ...], eps: float, rtol: float | None) -> bool:
    """Return whether ``dtype`` holds every result, so that none need be looked at; float32 with usual options does.

    That is known of logarithms, and of powers between -1/2 and 1/2.
    The smallest number of float32 that isn't zero is 1e-45, so no eigenvalue that is kept is below ``1e-45 * rtol``.
    """
    if dtype != torch.float32 or (rtol or 0.0) + eps <= 1e-25 or eps >= 1e60:
        return False
    return functions in ROOTS or all(
        name == "log" or (name == "power" and abs(options[0]) <= 0.5) for name, options in functions
    )


def batched(size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Return the tensors with the dimension of `torch.vmap` in front, expanded where they had none."""
    return [
        None if tensor is None else tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


@with_forward_mode
class _Spectral(torch.autograd.Function):
    """``A -> f(A + eps I)`` for one or more ``f``, with the eigenvalues and eigenvectors behind them."""

    @staticmethod
    def forward(
        A: Tensor,
        floor: Tensor | None,
        functions: tuple[Chosen, ...],
        method: str,
        noise: float,
        wide: bool,
        gradient: str,
        eps: float,
        rtol: float | None,
    ) -> tuple[Tensor, ...]:
        part, asymmetry = wide_symmetric(A)
        semidefinite = not spectral_function(functions[0])[0].whole_line
        decomposed = part if wide else part.to(A.device, at_least_float32(A.dtype))
        eigenvalues, U = decompose(decomposed, method, asymmetry=asymmetry, noise=noise, semidefinite=semidefinite)
        eigenvalues, U = eigenvalues.to(part.device, real_dtype(part.dtype)), U.to(part)
        parts = _parts(eigenvalues, floor, eps, rtol, functions[0])
        results = (function_of(U, parts, function) for function in functions)
        if fit(A.dtype, functions, eps, rtol):
            return *(result.to(A) for result in results), eigenvalues, U
        return *(narrow(result, A) for result in results), eigenvalues, U

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        A, floor, ctx.functions, _, _, _, *ctx.options = inputs
        *_, eigenvalues, U = output
        ctx.mark_non_differentiable(eigenvalues, U)
        _save(ctx, A, eigenvalues, U, floor)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        A, eigenvalues, U, floor = ctx.saved_tensors
        total: Tensor | None = None
        with autocast_off(A.device):
            for function, G in zip(ctx.functions, grads[: len(ctx.functions)], strict=True):
                if G is not None:
                    part = applied(_Derivative, A, G, eigenvalues, U, floor, function, *ctx.options)
                    total = part if total is None else total + part
            # The parts may exceed what a half type holds where their sum doesn't, so it is narrowed alone.
            to_A = None if total is None else narrow(total, A)
        return to_A, *((None,) * 8)

    @staticmethod
    def tangent(ctx: Context, saved: Saved, direction: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        A, eigenvalues, U, floor = saved
        assert A is not None
        with autocast_off(A.device):
            tangents = (
                applied(_Derivative, A, direction, eigenvalues, U, floor, function, *ctx.options)
                for function in ctx.functions
            )
            return *(narrow(tangent, A) for tangent in tangents), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        output = applied(_Spectral, *batched(info.batch_size, in_dims[:2], inputs[:2]), *inputs[2:])
        return output, (0,) * len(output)


@with_forward_mode
class _Derivative(torch.autograd.Function):
    """``(A, G) -> U (F o (U^H G U)) U^H``, in the dtype of ``U``: symmetric in ``G``, so its own adjoint in it."""

    @staticmethod
    def forward(
        A: Tensor,
        G: Tensor,
        eigenvalues: Tensor,
        U: Tensor,
        floor: Tensor | None,
        function: Chosen,
        gradient: str,
        eps: float,
        rtol: float | None,
    ) -> Tensor:
        parts = _parts(eigenvalues, floor, eps, rtol, function)
        rule, options = resolve(GRADIENTS, gradient, "gradient", "backward")
        F = differences(rule, options, parts, function, eps)
        scale = _scale(F) if A.dtype in (torch.float64, torch.complex128) else None
        if scale is not None:
            F = finite(F) / scale
        # F is symmetric, so the symmetric part may be taken last, where it is cheapest. Of the two factors it is G that
        # may be of several directions at once.
        inner = product(product(U.mH, G.to(U.dtype)), U).mul_(F)
        result = symmetric(product(product(U, inner), U.mH))
        return result if scale is None else finite(result * scale)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.function, ctx.gradient, ctx.eps, ctx.rtol = inputs
        _save(ctx, *tensors)

    @staticmethod
    def backward(ctx: Context, H: Tensor | None) -> tuple[Any, ...]:
        A, G, eigenvalues, U, floor = ctx.saved_tensors
        to_A = to_G = None
        if H is not None:
            _check_exact(ctx.gradient)
            with autocast_off(A.device):
                options = (eigenvalues, U, floor, ctx.function)
                if ctx.needs_input_grad[0]:
                    to_A = narrow(applied(_SecondDerivative, A, G, H, *options, ctx.eps, ctx.rtol), A)
                if ctx.needs_input_grad[1]:
                    to_G = narrow(applied(_Derivative, A, H, *options, "exact", ctx.eps, ctx.rtol), G)
        return to_A, to_G, None, None, None, None, None, None, None

    @staticmethod
    def tangent(ctx: Context, saved: Saved, along_A: Tensor | None, along_G: Tensor | None, *_: None) -> Tensor | None:
        A, G, eigenvalues, U, floor = saved
        _check_exact(ctx.gradient if along_A is not None else "exact")
        with autocast_off(ctx.device):
            parts = []
            if along_A is not None:
                parts.append(
                    applied(_SecondDerivative, A, G, along_A, eigenvalues, U, floor, ctx.function, ctx.eps, ctx.rtol)
                )
            if along_G is not None:
                options = (ctx.function, ctx.gradient, ctx.eps, ctx.rtol)
                parts.append(applied(_Derivative, A, along_G, eigenvalues, U, floor, *options))
            return _total(parts)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return applied(_Derivative, *batched(info.batch_size, in_dims[:5], inputs[:5]), *inputs[5:]), 0


def _scale(F: Tensor) -> Tensor | None:
    """Return what differences ``F`` must be divided by so that no product overflows; None where that is known to be 1.

    The inverse root of eigenvalues below 1e-100 has differences above 1e150.
    """
    if not F.numel():
        return None
    largest = F.abs().amax((-2, -1), keepdim=True)
    if F.is_cpu and not torch.compiler.is_compiling() and not (largest > 1e150).any():
        return None
    return torch.where(largest > 1e150, finite(largest), 1.0)


def _save(ctx: Context, *tensors: Tensor | None) -> None:
    """Keep tensors for the derivatives of either mode."""
    ctx.device = tensors[0].device if tensors[0] is not None else None
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def _check_exact(gradient: str) -> None:
    if gradient != "exact":
        raise GradientError(f"the gradient rule {gradient!r} can't be differentiated again; use gradient='exact'.")


def _total(parts: list[Tensor]) -> Tensor | None:
    return functools.reduce(torch.add, parts) if parts else None


@with_forward_mode
class _SecondDerivative(torch.autograd.Function):
    """``(A, G, H) -> D2(A)[G, H]``, in the dtype of ``U``: the derivative of ``<H, D1(A)[G]>`` by ``A``."""

    @staticmethod
    def forward(
        A: Tensor,
        G: Tensor,
        H: Tensor,
        eigenvalues: Tensor,
        U: Tensor,
        floor: Tensor | None,
        function: Chosen,
        eps: float,
        rtol: float | None,
    ) -> Tensor:
        parts = _parts(eigenvalues, floor, eps, rtol, function)
        in_eigenbasis = (U.mH @ symmetric(part.to(U)) @ U for part in (G, H))
        return U @ second_derivative(parts, function, *in_eigenbasis) @ U.mH

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.function, ctx.eps, ctx.rtol = inputs
        _save(ctx, *tensors)

    @staticmethod
    def backward(ctx: Context, K: Tensor | None) -> tuple[Any, ...]:
        A, G, H, *rest = ctx.saved_tensors
        options = (*rest, ctx.function, ctx.eps, ctx.rtol)
        to_A = to_G = to_H = None
        if K is not None:
            with autocast_off(A.device):
                if ctx.needs_input_grad[0]:
                    to_A = narrow(_third_derivative(A, G, H, K, *options), A)
                if ctx.needs_input_grad[1]:
                    to_G = narrow(applied(_SecondDerivative, A, K, H, *options), G)
                if ctx.needs_input_grad[2]:
                    to_H = narrow(applied(_SecondDerivative, A, G, K, *options), H)
        return to_A, to_G, to_H, None, None, None, None, None, None

    @staticmethod
    def tangent(ctx: Context, saved: Saved, *directions: Tensor | None) -> Tensor | None:
        A, G, H, *rest = saved
        along_A, along_G, along_H = directions[:3]
        options: tuple[Any, ...] = (*rest, ctx.function, ctx.eps, ctx.rtol)
        with autocast_off(ctx.device):
            parts = []
            if along_A is not None:
                assert A is not None
                assert G is not None
                assert H is not None
                parts.append(_third_derivative(A, G, H, along_A, *options))
            if along_G is not None:
                parts.append(applied(_SecondDerivative, A, along_G, H, *options))
            if along_H is not None:
                parts.append(applied(_SecondDerivative, A, G, along_H, *options))
            return _total(parts)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return applied(_SecondDerivative, *batched(info.batch_size, in_dims[:6], inputs[:6]), *inputs[6:]), 0


def _third_derivative(
    A: Tensor,
    G: Tensor,
    H: Tensor,
    K: Tensor,
    eigenvalues: Tensor,
    U: Tensor,
    floor: Tensor | None,
    function: Chosen,
    eps: float,
    rtol: float | None,
) -> Tensor:
    """Return ``D3(A)[G, H, K]`` of a root, in terms of its first two derivatives and so differentiable to every order.

    From ``Q Q = A`` follow, with ``L = D1`` of the root and ``X, Y, Z = L[G], L[H], L[K]``,

        D2[G, H] = -L[X Y + Y X],    D3[G, H, K] = -D2[G, Y Z + Z Y] - D2[H, X Z + Z X] - D2[K, X Y + Y X]

    and from ``S Q = I`` those of the inverse root ``S``, by differentiating ``D1[G] = -S X S`` twice. Other functions
    have no such relation: their third derivative would need all ``n^4`` third divided differences. Nor does it hold for
    dropped or clamped eigenvalues, which the function does not take the root of.
    """
    entry, _ = spectral_function(function)
    if not entry.is_root or is_clamped(function) or split(eigenvalues, eps, rtol, floor).kept is not None:
        raise GradientError(
            "a spectral function by eigenvalues is differentiable twice, and the roots more often where no eigenvalue "
            "is dropped or clamped; pass eps > 0 to a root, or use solver='newton_schulz'."
        )
    G, H, K = (symmetric(each.to(U)) for each in (G, H, K))

    def first(direction: Tensor) -> Tensor:
        found: Tensor = applied(_Derivative, A, direction, eigenvalues, U, floor, SQRT, "exact", eps, rtol)
        return found

    def second(one: Tensor, other: Tensor) -> Tensor:
        found: Tensor = applied(_SecondDerivative, A, one, other, eigenvalues, U, floor, SQRT, eps, rtol)
        return found

    X, Y, Z = first(G), first(H), first(K)
    root = -second(G, _twice(Y, Z)) - second(H, _twice(X, Z)) - second(K, _twice(X, Y))
    if function == SQRT:
        return root
    (S, *_) = applied(_Spectral, widen(A), floor, (INV_SQRT,), "eigh", noise_of(A.dtype), True, "exact", eps, rtol)
    XY, XZ, YZ = second(G, H), second(G, K), second(H, K)
    # d(S) = -S Z S in each factor of D2[G, H] = S (Y S X + X S Y - XY) S.
    inner = _twice(YZ, X, S) + _twice(XZ, Y, S) + _twice(XY, Z, S) - root
    triple = sum((P @ S @ (_twice(Q, R, S)) for P, Q, R in ((X, Y, Z), (Y, X, Z), (Z, X, Y))), torch.zeros_like(X))
    inverse: Tensor = S @ (inner - triple) @ S
    return inverse


def _twice(P: Tensor, Q: Tensor, S: Tensor | None = None) -> Tensor:
    """Return ``P Q + Q P``, or with ``S`` between them ``P S Q + Q S P``."""
    product = P @ Q if S is None else P @ S @ Q
    return product + product.mH
