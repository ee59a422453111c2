"""Applying a `torch.autograd.Function` to small matrices, where what surrounds it counts."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from orthocond._core import private
from orthocond.errors import GradientError

__all__ = [
    "applied",
    "changeable",
    "is_ordinary",
    "is_plain",
    "is_plain_inference",
    "is_unwatched",
    "with_forward_mode",
]

F = TypeVar("F", bound=type[torch.autograd.Function])


def is_plain() -> bool:
    """Return whether operations just run: no compiler, no tracer and no transform of `torch.func` looks on."""
    return not (torch.compiler.is_compiling() or private.transforms_are_active() or private.is_tracing())


def is_ordinary(A: Tensor) -> bool:
    """Return whether operations on ``A`` just run, in its dtype, and only a backward derivative can be asked for."""
    return (
        type(A) in (Tensor, nn.Parameter)
        and is_plain()
        and not private.forward_mode_is_on()
        and not private.is_transformed(A)
        and not torch.is_autocast_enabled(A.device.type)
    )


def changeable(y: Tensor) -> Tensor:
    """Return ``y`` so that it can be changed in place, as the outputs of torch's own layers can.

    Autograd forbids changing a view that was made without gradients once they are on again; detached, it is no view.
    """
    return y.detach() if is_plain_inference() else y


def is_plain_inference() -> bool:
    """Return whether operations just run and no derivative, backward or forward, can be asked for."""
    return is_plain() and not torch.is_grad_enabled() and not private.forward_mode_is_on()


def is_unwatched(*tensors: Tensor) -> bool:
    """Return whether operations just run on the memory of these tensors: on the CPU, and no mode looks on."""
    return (
        is_plain_inference()
        and all(each.is_cpu and type(each) is Tensor for each in tensors)
        and not private.num_dispatch_modes()
    )


def with_forward_mode(function: F) -> F:
    """Give a function the forward derivative that its method ``tangent(ctx, saved, *directions)`` computes.

    `applied` takes a subclass with a method ``jvp`` that calls it; two things of torch's own are put right there.

    - `torch.compile` refuses a function that has a ``jvp``, though it never calls it: there it is the function itself.
    - torch switches forward mode off within ``jvp``, for all levels, so that a derivative of the derivative
      (``jacfwd`` of ``jacfwd``) would silently be zero. Here it is on, and ``saved`` holds the saved tensors without
      their tangents of this level.
    """

    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        with _forward_mode_on():
            saved = tuple(None if each is None else forward_ad.unpack_dual(each).primal for each in ctx.saved_tensors)
            return function.tangent(ctx, saved, *directions)  # type: ignore[attr-defined]

    function._with_jvp = type(function.__name__, (function,), {"jvp": staticmethod(jvp)})  # type: ignore[attr-defined]
    return function


def _forward_mode_on() -> AbstractContextManager[object]:
    if private.set_forward_mode is not None:
        return private.set_forward_mode(True)
    if private.transforms_are_active():
        raise GradientError(
            "this version of torch can't nest forward derivatives; use torch.func.jacrev, or torch.autograd.forward_ad."
        )
    return nullcontext()


def _requires_grad(inputs: tuple[Any, ...]) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in inputs)


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Return ``function.apply(*inputs)`` for inputs that are complete and in order.

    `torch.autograd.Function.apply` reads the signature of ``forward`` again each time, to fill in defaults that it
    hasn't; at 64x64 that costs a tenth of the decomposition.
    """
    if torch.compiler.is_compiling():
        if private.forward_mode_is_on():  # the compiler would drop the tangent (pytorch issue 192985)
            raise GradientError("torch.compile has no forward mode here; leave torch.func.jvp out of what is compiled.")
        return function.apply(*inputs)
    function = getattr(function, "_with_jvp", function)
    if private.unwrap_dead_wrappers is None or not is_plain():
        return function.apply(*inputs)
    inputs = private.unwrap_dead_wrappers(inputs)
    if not private.forward_mode_is_on() and not (torch.is_grad_enabled() and _requires_grad(inputs)):
        return function.forward(*inputs)
    return super(torch.autograd.Function, function).apply(*inputs)  # type: ignore[misc]  # C code
