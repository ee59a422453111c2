"""The host: it applies parts to a layer and an optimizer, and knows none of them by name."""

from collections.abc import Iterable
from contextlib import ExitStack
from html import escape
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from orthocond.errors import ArgumentError, OrthocondWarning
from orthocond.treatments._optimizer import (
    StepRate,
    check_scheduler,
    group_of,
    unwrapped_optimizer,
    without_split_group,
)
from orthocond.treatments._part import Note, Part, overrides
from orthocond.treatments._saved import check_state, saved_parts, spelled_state
from orthocond.treatments._step import RATE, LastStep, Step
from orthocond.treatments._target import Target
from orthocond.treatments._unused import Replaced, Unused

__all__ = ["Treatment"]


class Treatment:
    """A treatment on a layer, as `orthocond.treat` makes it.

    Within a step the order is: unscale (GradScaler), the user's clipping, the parts by their ``order`` (``gauge``,
    ``nog``, ``olr``), the optimizer's step. So ``nog`` and ``olr`` work with the weight, gradient and metric of the
    step itself. A learning rate that a part sets is restored after the step, so schedulers never see it.

    Example:
        >>> import orthocond
        >>> model = nn.Sequential(nn.Linear(4, 4, bias=False))
        >>> treatment = orthocond.treat(model, "0", "ow")
        >>> orthocond.nn.is_orthogonal(model[0].weight)
        True
        >>> treatment.remove()  # the plain weight again, where it is now
        >>> type(model[0].weight).__name__
        'Parameter'
    """

    def __init__(self, target: Target, parts: Iterable[Part]) -> None:
        self._target = target
        self.parts = target.parts = {part.name: part for part in parts}
        """The parts by name, in the order in which the specification is spelled."""
        by_order = sorted(self.parts.values(), key=lambda part: part.order)
        self._acting = [part for part in by_order if overrides(part, "act")]
        self._watching = [part for part in by_order if overrides(part, "watch")]
        self._penalizing = [part for part in by_order if overrides(part, "penalty")]
        self.notes: dict[str, Note] = {note.name: note for note in (RATE, *(n for p in by_order for n in p.notes))}
        """What can be read from `last`, by name."""
        self._is_replaced = any(part.replaces_weight for part in by_order)
        self._optimizer: torch.optim.Optimizer | None = None
        self._handles: list[Any] = []
        self._rate: StepRate | None = None
        self._last: LastStep | None = None
        self._has_warned = False
        self._adds_penalty = False
        self._install(by_order)

    def _expect_use(self, before: nn.Parameter) -> None:
        """Warn from now on if the model is trained without the treatment, or with the parameter that it had before."""
        self._unused = Unused(self.parameter, self.name, self.spec, self._needed())
        if self.parameter is not before and self.parameter.requires_grad:
            Replaced(before, self.parameter, self.name, self.spec)

    def _needed(self) -> set[str]:
        needed = {"attach"} if self._acting or self._watching else set[str]()
        return needed | ({"penalty"} if self._penalizing else set[str]())

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: it is not attached, because the copy of an optimizer has no hooks."""
        missing = self._unused.missing if self._optimizer is None else self._needed()
        return {**vars(self), "_optimizer": None, "_handles": [], "_rate": None, "_unused": set(missing)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        is_complete = bool(vars(self.layer))  # unless the layer holds the treatment, and is copied with it
        self._unused = Unused(self.parameter if is_complete else None, self.name, self.spec, state["_unused"])

    def __repr__(self) -> str:
        return f"Treatment(layer={self.name!r}, spec={self.spec!r})"

    def _repr_html_(self) -> str:
        """Return a table for a notebook: the parts, and what the last step did."""
        state = "attached" if self._optimizer is not None else "not attached"
        rows = [(repr(part), part.description) for part in self.parts.values()]
        rows += [(name, str(value)) for name, value in (self._last or {}).items() if value is not None]
        cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows)
        return f"<p>{escape(repr(self))}, {state}</p><table>{cells}</table>"

    @property
    def layer(self) -> nn.Module:
        """The layer that is treated."""
        return self._target.layer

    @property
    def name(self) -> str:
        """The layer's dotted name."""
        return self._target.name

    @property
    def spec(self) -> str:
        """The specification in its canonical spelling."""
        return "+".join(map(repr, self.parts.values())) or "none"

    @property
    def parameter(self) -> nn.Parameter:
        """The trained tensor: the weight, or the tensor behind its parametrization."""
        return self._target.parameter

    @property
    def last(self) -> LastStep | None:
        """What the last step did; None before the first."""
        return self._last

    def attach(self, optimizer: Any, *, scheduler: Any = None, penalty: bool = False) -> "Treatment":
        """Let the treatment act on the steps of an optimizer.

        The optimizer's parameter groups don't change. A learning rate that a part sets lasts for one step, in a group
        that exists only during that step.

        Args:
            optimizer: any torch optimizer that uses one gradient per step, also wrapped by Accelerate or Fabric.
            scheduler: optional; if given, it is checked to belong to this optimizer. Schedulers can be created before
                or after this call.
            penalty: add the gradient of `penalty` in each step, for a training loop whose loss you can't change. It
                comes after the clipping of gradients. Don't add `penalty` to the loss as well.

        Raises:
            ArgumentError: it is attached already, the optimizer does not hold the parameter, it is LBFGS (which takes
                several steps in one), or the scheduler belongs to another optimizer.
        """
        if self._optimizer is not None:
            raise ArgumentError(f"{self!r} is attached to an optimizer already; call detach() first.")
        optimizer = unwrapped_optimizer(optimizer)
        if group_of(self.parameter, optimizer) is None:
            raise ArgumentError(
                f"the optimizer does not hold the parameter of {self.name!r} (treated with {self.spec}); "
                "make the optimizer after treat(), from model.parameters()."
            )
        if scheduler is not None:
            check_scheduler(scheduler, optimizer)
        for part in self._watching:
            part.watch(self._target)
        self._adds_penalty = penalty and bool(self._penalizing)
        if self._acting or self._adds_penalty:
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_state_dict_pre_hook(self._after_step),  # after a step that failed
                optimizer.register_load_state_dict_pre_hook(self._before_load),
            ]
        self._optimizer = optimizer
        self._unused.done("attach")
        if self._adds_penalty:
            self._unused.done("penalty")
        return self

    def detach(self) -> None:
        """Stop acting on the optimizer's steps; weight and groups stay as they are."""
        self._put_back()
        self._target.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._optimizer = None
        self._unused.done("attach")

    def remove(self) -> None:
        """Detach, and replace a parametrized weight by a plain one.

        Raises:
            ArgumentError: ``ow`` with ``kind="operator"``, which no plain weight can replace.
        """
        is_parametrized = parametrize.is_parametrized(self.layer, "weight")
        if self._is_replaced and not is_parametrized:
            raise ArgumentError(f"{self!r} changed the layer itself, which no plain weight can replace; keep it.")
        self.detach()
        if self._is_replaced:
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=True)
            self._is_replaced = False

    def penalty(self) -> Tensor:
        """Return the term to add to the loss: zero without ``ol``."""
        self._unused.done("penalty")
        penalties = [part.penalty(self._target) for part in self._penalizing]
        given = [penalty for penalty in penalties if penalty is not None]
        if not given:
            return self.parameter.new_zeros(())
        return given[0] if len(given) == 1 else torch.stack(given).sum()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in plain types and tensors; the weight is in the model's state."""
        return {
            "layer": self.name,
            "spec": self.spec,
            "parts": {
                name: {"options": dict(part.options), "state": part.state_dict()} for name, part in self.parts.items()
            },
            "last": None if self._last is None else dict(self._last),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            ArgumentError: it belongs to another treatment or layer.
        """
        check_state(state)
        saved, own = saved_parts(state), saved_parts(self.state_dict())
        for name in saved.keys() & own.keys():  # options that are younger than the state
            saved[name]["options"] = {**type(self.parts[name]).options, **saved[name]["options"]}
        spellings = [(spelled_state(parts), layer) for parts, layer in ((saved, state["layer"]), (own, self.name))]
        if spellings[0] != spellings[1]:
            (spec, layer), (own_spec, own_layer) = spellings
            raise ArgumentError(
                f"the state is that of {spec} on {layer!r}, not of {own_spec} on {own_layer!r}; "
                "treat the model as it was when the checkpoint was written."
            )
        for name, part in self.parts.items():
            part.load_state_dict(saved[name]["state"])
        last = state["last"]
        self._last = None if last is None else LastStep(self.notes, last)

    def _install(self, parts: list[Part]) -> None:
        is_frozen = not self.parameter.requires_grad  # and it is one that can be treated
        for part in parts:
            if part._is_installed:
                raise ArgumentError(f"this {part!r} treats a layer already; make an instance for each layer.")
        for part in parts:
            part._is_installed = True
            part.install(self._target)
        self._target.example_input = None
        if self._is_replaced and parametrize.is_parametrized(self.layer, "weight"):
            # A new object: an optimizer made before holds the old one, which shows when it is attached.
            parametrizations: Any = self.layer.parametrizations
            trained = parametrizations.weight
            trained.original = nn.Parameter(trained.original.detach().clone(), requires_grad=not is_frozen)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._put_back()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._act(optimizer)
            return None

        def closure_and_treatment() -> Any:
            loss = closure()
            self._put_back()
            self._act(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure_and_treatment, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_and_treatment}

    @torch.no_grad()
    def _act(self, optimizer: torch.optim.Optimizer) -> None:
        parameter = self.parameter
        group = group_of(parameter, optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        self._last = None
        if group is None or parameter.grad is None or (found_inf is not None and bool(found_inf)):
            return
        if self._target.is_blind and not self._has_warned:
            self._warn_blind()
        if self._adds_penalty:
            self._add_penalty(getattr(optimizer, "grad_scale", None))
        step = Step(self._target, optimizer, group)
        with ExitStack() as stack:
            for number, part in enumerate(self._acting, 1):
                step.has_inner_parts = number < len(self._acting)
                around = part.act(step)
                if around is not None:
                    stack.enter_context(around)
        if step.own_rate is not None:
            self._rate = StepRate(optimizer, parameter, step.own_rate)
        rate = group["lr"] if self._rate is None else self._rate.rate
        step.note(learning_rate=rate.clone() if isinstance(rate, Tensor) else float(rate))
        self._last = LastStep(self.notes, step.noted)

    def _add_penalty(self, scale: Tensor | None) -> None:
        """Add the penalty's gradient, scaled as those that a fused optimizer gets from a GradScaler."""
        parameters = [parameter for parameter in self.layer.parameters() if parameter.requires_grad]
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.penalty(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient if scale is None else gradient * scale)

    def _warn_blind(self) -> None:
        self._has_warned = True
        names = " and ".join(part.name for part in self._watching)
        warn(
            f"{names} did not see the forward pass of {self.name!r} and does nothing: it came before attach(), or it "
            "uses the weight without calling the layer; attach the treatment before the training.",
            OrthocondWarning,
            stacklevel=2,
        )

    def _after_step(self, *_: Any) -> None:
        self._put_back()

    def _before_load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        self._put_back()
        return without_split_group(self.parameter, optimizer, state)

    def _put_back(self) -> None:
        """Restore the scheduled learning rate."""
        if self._rate is not None:
            self._rate.undo()
            self._rate = None
