"""Functions of the covariance of few samples, at the cost of the smaller side of the features.

With centred features ``Y`` ``(d, N)``, divided by the root of ``N``, the covariance is ``P = Y Y^H``, and

    f(Y Y^H) = f(0) I + Y g(Y^H Y) Y^H,    g(l) = (f(l) - f(0)) / l

so with fewer samples than features the ``N x N`` Gram matrix ``K = Y^H Y = V diag(l) V^H`` is all that is decomposed.
With ``T = Y V``, whose columns have the lengths ``sqrt(l)``, and the divided differences ``D`` of ``g``,

    f(P) = f(0) I + T diag(g) T^H,    dY = 2 [(G T) diag(g) + T (D o (T^H G T))] V^H

for an incoming Hermitian ``G``. Nothing is divided by the length of a column, and what rounding does to a column is
relative to that length. So the products with ``d x d`` matrices may be taken in the precision of the features, where
the Gram matrix and its decomposition need float64.

The differences of ``g`` are those of ``f`` with one point at zero: ``g(l_i) = f[l_i, 0]``, ``D_ij = f[l_i, l_j, 0]``. A
zero eigenvalue, where the function drops it, counts as one that is dropped: then ``f(0) = 0``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthocond._core import private
from orthocond._core.applying import applied, is_plain
from orthocond._core.observing import notify
from orthocond._core.onednn import is_faster, linear
from orthocond._core.overriding import overridable
from orthocond._core.precision import autocast_off, finite, finite_, lift, narrow, widen
from orthocond.linalg._covariance import check_samples, covariance, noise_floor, trace
from orthocond.linalg._decompose import decompose
from orthocond.linalg._differences import Split, first_differences, most_dropped, split, values
from orthocond.linalg._eigen import Context, batched, eigen_derivatives, product
from orthocond.linalg._functions import SQRT, Chosen, is_clamped
from orthocond.linalg._roots import resolved, spectral

__all__ = ["covariance_sqrth", "spectral_of_samples", "upper_triangle"]

_WORTHWHILE = 0.9
"""The largest number of samples per feature for which the Gram matrix is cheaper to decompose."""


def covariance_sqrth(
    X: Tensor,
    *,
    dim: int = -1,
    solver: str = "eigh",
    gradient: str = "exact",
    eps: float = 0.0,
    rtol: float | None = None,
) -> Tensor:
    r"""Return the square root of the covariance of samples, at the cost of the smaller side of ``X``.

    .. math:: Q = (X J X^T + \epsilon I)^{1/2}

    It is ``matrix_sqrth(covariance(X))``, with eigenvalues below the rounding noise of the features dropped. With fewer
    samples than features it decomposes the Gram matrix of the samples instead, by
    :math:`f(Y Y^T) = f(0) I + Y g(Y^T Y) Y^T` with :math:`g(\lambda) = (f(\lambda) - f(0)) / \lambda`.

    *Gradient:* exact with respect to the features, finite at rank loss and at repeated eigenvalues. Second derivatives
    and forward mode use the covariance itself, at its full cost.

    Args:
        X: features ``(..., d, N)`` with the samples last, real or complex; in general the samples lie along ``dim`` and
            the features along the last of the other dimensions, as in `covariance`.
        dim: the dimension of the samples.
        solver: one of `SOLVERS`; those without eigenvalues, and ``wide=false``, use the covariance itself.
        gradient: one of `GRADIENTS`; the rules other than ``"exact"`` use the covariance itself.
        eps: added to the eigenvalues; a floor for them with ``solver="eigh(clamp=true)"``.
        rtol: as in `matrix_sqrth`, of the ``d`` eigenvalues of the covariance.

    Returns:
        The roots ``(..., d, d)``, in the dtype and on the device of ``X``.

    Raises:
        ArgumentError, DtypeError, NonFiniteError, SolverError: as in `covariance` and `matrix_sqrth`.

    Reference:
        Higham, Functions of Matrices, 2008, theorem 1.35; Song, Sebe, Wang 2022, eqs. 2 and 4.

    Example:
        Two samples of three features: a 2x2 matrix is decomposed.

        >>> covariance_sqrth(torch.tensor([[1.0, 3.0], [0.0, 0.0], [2.0, 2.0]]))
        tensor([[1., 0., 0.],
                [0., 0., 0.],
                [0., 0., 0.]])
    """
    check_samples(X, dim, "covariance_sqrth")
    (Q,), *_ = spectral_of_samples(
        "covariance_sqrth", X.movedim(dim, -1), SQRT, solver=solver, gradient=gradient, eps=eps, rtol=rtol
    )
    return Q


@overridable
def spectral_of_samples(
    caller: str,
    X: Tensor,
    function: Chosen | str,
    *,
    solver: str = "eigh",
    gradient: str = "exact",
    eps: float = 0.0,
    rtol: float | None = None,
    upper: bool = False,
) -> tuple[tuple[Tensor], Tensor | None, Tensor | None, Tensor]:
    """Return ``f(covariance(X) + eps I)`` of samples in the last dimension, its eigenvalues, the covariance, its noise.

    It does what `spectral` does with the covariance and its `noise_floor`, at the cost of the smaller side. The
    eigenvalues ``(..., d)`` are None where the solver has none, and the covariance is None where it was not needed.
    With ``upper`` a value from the smaller side, without a covariance, is the upper triangle alone, row by row:
    ``(..., d (d + 1) / 2)``.
    """
    entry, choices, (chosen,), cut = resolved(caller, X.mT, (function,), solver, gradient, eps, rtol)
    is_covered = choices.get("wide", False) and gradient == "exact" and not private.forward_mode_is_on()
    with autocast_off(X.device):
        samples = lift(X)  # a half type would overflow where its features don't
        is_half = samples.dtype != X.dtype
        noise = noise_floor(samples.mean(-1), samples.var(-1, correction=0).sum(-1) if is_half else None, X.dtype)
        if not is_covered or X.shape[-1] > _WORTHWHILE * X.shape[-2]:
            P = covariance(samples)
            if is_plain() and not _has_all_digits(P.detach(), samples.detach()):
                P = covariance(widen(samples))
            options: dict[str, Any] = {"solver": solver, "gradient": gradient, "eps": eps, "rtol": cut}
            (value,), eigenvalues = spectral(caller, P, (function,), floor=noise, **options)
            return (narrow(value, X),), eigenvalues, P, noise
        value, eigenvalues, *_ = applied(_OfSamples, samples, noise, chosen, entry.name, eps, cut, upper)
    notify(caller, X.mT, eigenvalues, eps, clamp=is_clamped(chosen))
    return (narrow(value, X),), eigenvalues, None, noise


def _has_all_digits(P: Tensor, samples: Tensor) -> bool:
    """Return whether covariances are as accurate as their dtype allows: no square overflowed, or was lost as too small.

    That of samples which are all the same is zero, and right.
    """
    if P.dtype in (torch.float64, torch.complex128) or P.is_meta or not P.numel():
        return True
    limits = torch.finfo(P.dtype)
    traces = trace(P).real
    smallest, largest = (bound.item() for bound in traces.aminmax())  # NaN if one is
    if not largest <= limits.max:
        return False
    if smallest * limits.eps >= limits.tiny:
        return True
    small = samples[traces * limits.eps < limits.tiny]
    return bool((small == small[..., :1]).all())


class _OfSamples(torch.autograd.Function):
    """``X -> f(covariance(X) + eps I)``, with its eigenvalues, and ``T``, ``V`` and the eigenvalues of the samples.

    ``T`` is divided by a power of two near its largest singular value, so that any features have products that fit.
    """

    @staticmethod
    def forward(
        X: Tensor,
        floor: Tensor | None,
        function: Chosen,
        method: str,
        eps: float,
        rtol: float | None,
        upper: bool,
    ) -> tuple[Tensor, ...]:
        part, num = _part(X), X.shape[-1]
        (K,) = _by_parts(part, _gram, X)
        l, V = decompose(K, method)
        l = l.clamp(min=0)
        f = values(_with_zero(l, floor, function, eps, rtol), function)
        # What cancels here is as small against f(0) as the column that it multiplies.
        g = (f[..., 1:] - f[..., :1]) / torch.where(l > 0, l, torch.inf)
        scale = _scale(l)
        from_factor = functools.partial(_factor_and_value, upper=upper)
        coefficients = _rounded(g * scale.square().squeeze(-1), X)
        T, value = _by_parts(part, from_factor, X, V / (scale * num**0.5), coefficients.unsqueeze(-2), f[..., :1])
        zeros = l.new_zeros(*l.shape[:-1], X.shape[-2] - num)
        return value, torch.cat([zeros, l], -1), T, V.to(X), l

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        X, floor, ctx.function, _, *ctx.options = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(X, floor, *output[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, G: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if G is None:
            return (None,) * 7
        X, *saved = ctx.saved_tensors
        with autocast_off(X.device):
            to_X = applied(_Slope, X, G, *saved, ctx.function, *ctx.options)
        return to_X, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        output = applied(_OfSamples, *batched(info.batch_size, in_dims[:2], inputs[:2]), *inputs[2:])
        return output, (0,) * len(output)


class _Slope(torch.autograd.Function):
    """``(X, G) -> dX``, the gradient of ``<G, f(covariance(X) + eps I)>``; with ``upper`` of its upper triangle."""

    @staticmethod
    def forward(
        X: Tensor,
        G: Tensor,
        floor: Tensor | None,
        T: Tensor,
        V: Tensor,
        l: Tensor,
        function: Chosen,
        eps: float,
        rtol: float | None,
        upper: bool,
    ) -> Tensor:
        g, D = _differences(l, _with_zero(l, floor, function, eps, rtol), function)
        scale, root = _scale(l), X.shape[-1] ** 0.5
        # T and Y were divided by the scale, dY by the root: here both meet g and D in float64, which holds the result.
        of_g = _rounded(g * (scale / root).squeeze(-1), T)
        through = functools.partial(_through_factor, upper=upper)
        (to_X,) = _by_parts(_part(X), through, G, T, V.mH, of_g.unsqueeze(-1) * V.mH, D * (scale.pow(3) / root))
        return to_X

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        X, G, floor, *_, ctx.function, ctx.eps, ctx.rtol, ctx.upper = inputs
        ctx.save_for_backward(X, G, floor)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, H: Tensor | None) -> tuple[Any, ...]:
        """With ``dX = 2 D1(P)[G] Y`` and ``L = H Y^H + Y H^H``: ``dG = D1[L]``, ``dX = 2 (D1[G] H + D2[G, L] Y)``."""
        if H is None:
            return (None,) * 10
        X, G, floor = ctx.saved_tensors
        with autocast_off(X.device):
            wide, along, num = widen(X), widen(H), X.shape[-1]
            Y, along = (each - each.mean(-1, keepdim=True) for each in (wide, along))
            outer = along @ Y.mH / num
            options = {"eps": ctx.eps, "rtol": ctx.rtol, "floor": floor}
            twice = _twice_mirrored(widen(G), X.shape[-2]) if ctx.upper else widen(G) + widen(G).mH
            along_G, to_G, second = eigen_derivatives(
                Y @ Y.mH / num, ctx.function, 0.5 * twice, outer + outer.mH, **options
            )
            to_X = (along_G @ along + second @ Y) * (2 / num)
            to_G = upper_triangle(to_G) if ctx.upper else to_G
            return narrow(to_X, X), narrow(to_G, G), *(None,) * 8

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return applied(_Slope, *batched(info.batch_size, in_dims[:6], inputs[:6]), *inputs[6:]), 0


def _gram(X: Tensor) -> tuple[Tensor]:
    """Return the Gram matrices ``Y^H Y`` ``(..., N, N)``, in float64."""
    Y = _centred(X)
    return (product(Y.mH, Y).div_(X.shape[-1]),)


def _centred(X: Tensor) -> Tensor:
    """Return ``Y`` times the root of ``N``, in float64."""
    wide = widen(X)
    mean = wide.mean(-1, keepdim=True)
    return wide - mean if wide is X else wide.sub_(mean)


def _factor_and_value(X: Tensor, V: Tensor, g: Tensor, constant: Tensor, *, upper: bool) -> tuple[Tensor, Tensor]:
    """Return ``T`` and ``T diag(g) T^H + constant I``, from ``V`` and ``g`` that are scaled."""
    T = product(_centred(X), V).to(X)
    value = finite_(_large_product(T * g, T.mH))
    if not (_is_at_hand(constant) and not constant.any()):  # it is 0 where zero is dropped
        value.diagonal(dim1=-2, dim2=-1).add_(constant.to(value))
    return T, upper_triangle(value) if upper else value


def _through_factor(G: Tensor, T: Tensor, Vh: Tensor, gVh: Tensor, D: Tensor, *, upper: bool) -> tuple[Tensor]:
    """Return ``(2 G T diag(g) + T (D o (2 T^H G T))) V^H``, from ``V^H``, ``diag(g) V^H`` and ``D``, all scaled."""
    # With twice the Hermitian part of G; to form that part of a whole G takes longer than a product.
    GT = _large_product(_twice_mirrored(G, T.shape[-2]), T) if upper else product(G, T) + product(G.mH, T)
    inner = finite_((product(T.mH, GT).to(D.device) * D).to(T))
    return (finite_(product(GT, gVh).add_(product(T, product(inner, Vh)))),)


def _large_product(P: Tensor, Q: Tensor) -> Tensor:
    """Return ``P Q``, of which one matrix or the result is ``d x d``."""
    if is_faster(P, Q) and P.ndim == 3 and len(P):  # len would fix a size that is dynamic where this is compiled
        fewest = _MULTIPLICATIONS if torch.get_num_threads() == 1 else _SHARED_MULTIPLICATIONS
        if P.shape[-2] * P.shape[-1] * Q.shape[-1] >= fewest:
            return torch.stack([linear(*pair) for pair in zip(P.unbind(), Q.mT.unbind(), strict=True)])
    return product(P, Q)


_MULTIPLICATIONS, _SHARED_MULTIPLICATIONS = 2**20, 2**23
"""So many of them are worth a call of their own, and so many one that several threads share."""
_IN_CACHE = 2**18
"""So many entries of ``d x d`` matrices at a time stay in the cache, and take no memory that the system would have to
provide page by page."""


def _part(X: Tensor) -> int | None:
    """Return how many of the features ``(b, d, N)`` to take at a time; None for all."""
    return max(1, _IN_CACHE // X.shape[-2] ** 2) if X.ndim == 3 and _is_at_hand(X) else None


def _is_at_hand(X: Tensor) -> bool:
    return X.is_cpu and not torch.compiler.is_compiling()


def _by_parts(part: int | None, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return what a function of tensors ``(b, ...)`` returns that acts on each member of the batch alone."""
    num = tensors[0].shape[0]
    if part is None or num <= part:
        return function(*tensors)
    results: tuple[Tensor, ...] = ()
    for start in range(0, num, part):
        pieces = function(*(each[start : start + part] for each in tensors))
        results = results or tuple(piece.new_empty(num, *piece.shape[1:]) for piece in pieces)
        for result, piece in zip(results, pieces, strict=True):
            result[start : start + part] = piece
    return results


def upper_triangle(Q: Tensor) -> Tensor:
    """Return the upper triangles ``(..., d (d + 1) / 2)`` of matrices ``(..., d, d)``, row by row."""
    upper, _ = _places(Q.shape[-1], Q.device)
    return Q.flatten(-2).index_select(-1, upper)


def _twice_mirrored(G: Tensor, d: int) -> Tensor:
    """Return ``G + G^T`` from the upper triangles of matrices that are zero below the diagonal."""
    _, mirrored = _places(d, G.device)
    twice: Tensor = G.index_select(-1, mirrored).view(*G.shape[:-1], d, d)
    twice.diagonal(dim1=-2, dim2=-1).mul_(2)  # the other entries are there twice
    return twice


_known_places: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
_MOST_PLACES = 4


def _places(d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where the upper triangle ``(d (d + 1) / 2)`` is in a matrix, and where each entry ``(d^2)`` is in it.

    The entries below the diagonal are those above it. A layer asks for the same places in every step.
    """
    known = _known_places.get((d, device))
    if known is not None and not torch.compiler.is_compiling():
        return known
    with torch.inference_mode(False):
        row, column = torch.triu_indices(d, d, device=device)
        upper = row * d + column
        mirrored = torch.empty(d, d, dtype=torch.long, device=device)
        order = torch.arange(len(upper), device=device)
        mirrored[row, column] = mirrored[column, row] = order
    places = upper, mirrored.flatten()
    if type(upper) is Tensor and is_plain():  # and no fake of it, nor a wrapper of torch.func
        if len(_known_places) >= _MOST_PLACES:
            _known_places.clear()
        _known_places[d, device] = places
    return places


def _with_zero(l: Tensor, floor: Tensor | None, function: Chosen, eps: float, rtol: float | None) -> Split:
    """Return the eigenvalues of the samples, and in front of them a zero for those of all other directions, split."""
    points = torch.cat([torch.zeros_like(l[..., :1]), l], -1)
    return split(points, eps, rtol, floor, function=function)


def _differences(l: Tensor, parts: Split, function: Chosen) -> tuple[Tensor, Tensor]:
    """Return ``g`` ``(..., N)`` and its divided differences ``D`` ``(..., N, N)``.

    ``D_ij = (f[l_i, l_j] - f[m, 0]) / M`` with the smaller ``m`` and the larger ``M`` of the two eigenvalues: the order
    without cancellation for the roots. Where it does cancel, ``M`` is small against ``eps``, and so is what ``D``
    multiplies.
    """
    F = first_differences(parts, function)
    g, F = F[..., 0, 1:], F[..., 1:, 1:]
    # In the upper triangle j, the column, has the larger one; the lower one is its mirror image.
    D = (F - g.unsqueeze(-1)).div_(torch.where(l > 0, l, torch.inf).unsqueeze(-2))
    D = D.triu() + D.triu(1).mT
    if parts.kept is None or parts.cutoff is None:
        return g, D
    # From a dropped row to a kept column across a gap below the cut-off, where F is bounded and no quotient any more.
    rows = min(most_dropped(parts), l.shape[-1])
    kept, smaller = parts.kept[..., 1:], l[..., :rows].unsqueeze(-1)
    is_bounded = ~kept[..., :rows].unsqueeze(-1) & kept.unsqueeze(-2) & (smaller > 0)
    is_bounded = is_bounded & (l.unsqueeze(-2) - smaller < parts.cutoff.unsqueeze(-1))
    quotient = (F[..., :rows, :] - g.unsqueeze(-2)) / torch.where(smaller > 0, smaller, 1.0)
    D[..., :rows, :] = torch.where(is_bounded, quotient, D[..., :rows, :])
    return g, D


def _rounded(coefficients: Tensor, T: Tensor) -> Tensor:
    """Return real coefficients in the precision and on the device of ``T``."""
    return finite(coefficients.to(T.device, T.real.dtype))


def _scale(l: Tensor) -> Tensor:
    """Return powers of two ``(..., 1, 1)`` near the square root of the largest eigenvalue; 1 where that is zero."""
    largest = l[..., -1:].unsqueeze(-1)
    return torch.exp2(torch.where(largest > 0, largest, 1.0).log2().mul_(0.5).round_())
