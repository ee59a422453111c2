"""The treatments of the Pre-SVD layer: their registry, how they are put on a model, and which layer it is.

A treatment is a ``+``-joined set of names of `TREATMENTS`, in any order; ``none`` is the empty one. It acts on one
layer, and nothing else changes.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from orthocond._core.layout import kernel_matrix
from orthocond._core.precision import widen
from orthocond._core.registry import Entry, frozen, resolve
from orthocond._gauge import Gauge, GaugeStep
from orthocond.errors import ArgumentError, OrthocondWarning, check_choice, check_nonnegative
from orthocond.graph import Join, find_pre_svd, has_matrix, unwrapped
from orthocond.linalg import POLAR_SOLVERS
from orthocond.nn import orthogonal_loss, orthogonal_weight
from orthocond.nn._orthogonal import KINDS
from orthocond.nn._skew import SkewOrthogonalConv2d
from orthocond.optim import RULES, nearest_orthogonal_gradient
from orthocond.optim._learning_rate import rate_for_matrices

__all__ = ["TREATMENTS", "LastStep", "Treatment", "TreatmentEntry", "find_pre_svd", "parse_treatment", "treat"]


@dataclass(frozen=True)
class TreatmentEntry(Entry):
    """A treatment: what it does, on what, and where the paper defines it.

    Example:
        >>> TREATMENTS["nog"].description
        'Nearest orthogonal gradient: the gradient U S V^T is replaced by U V^T.'
    """

    acts_on: str = ""
    """``"weight"``, ``"gradient"``, ``"learning rate"`` or ``"loss"``."""


TREATMENTS = frozen(
    TreatmentEntry(
        "sn",
        "Spectral norm: the weight is divided by its largest singular value, W / sigma_max(W).",
        "Miyato et al., ICLR 2018; Song, Sebe, Wang 2022, eq. 11",
        acts_on="weight",
    ),
    TreatmentEntry(
        "ol",
        "Orthogonal loss: ||W W^T - I||_F is added to the loss.",
        "Wang et al., CVPR 2020; Song, Sebe, Wang 2022, eq. 12",
        acts_on="loss",
    ),
    TreatmentEntry(
        "ow",
        "Orthogonal weight: exp(W - W^T) is used as the weight.",
        "Singla and Feizi, ICML 2021; Song, Sebe, Wang 2022, eq. 13",
        acts_on="weight",
    ),
    TreatmentEntry(
        "nog",
        "Nearest orthogonal gradient: the gradient U S V^T is replaced by U V^T.",
        "Song, Sebe, Wang 2022, eqs. 14 to 17",
        acts_on="gradient",
    ),
    TreatmentEntry(
        "olr",
        "Optimal learning rate: eta*, after which the weight is nearest to orthogonal, where 0 < eta* < lr.",
        "Song, Sebe, Wang 2022, eqs. 18 to 21",
        acts_on="learning rate",
    ),
    TreatmentEntry(
        "gauge",
        "Re-gauging: where the covariance P is ill conditioned, the weight is replaced by c P^(-1/2) W, "
        "which whitening can't tell from W.",
        "ours; docs/gauge.md",
        acts_on="weight",
    ),
)
"""The treatments by name.

Example:
    >>> {name: entry.acts_on for name, entry in TREATMENTS.items()}
    {'sn': 'weight', 'ol': 'loss', 'ow': 'weight', 'nog': 'gradient', 'olr': 'learning rate', 'gauge': 'weight'}
"""

_OPTIONS = MappingProxyType(
    {
        "kind": "kernel",
        "normalize": True,
        "penalty_weight": 1.0,
        "rule": "paper",
        "solver": "gram",
        "threshold": 10.0,
        "scale": "trace",
        "momentum": "keep",
        "metric": "input",
        "process_group": None,
    }
)


@dataclass(frozen=True)
class LastStep:
    """What a treatment did in the last step.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> treatment = treat(model, "0", "nog").attach(optimizer)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> optimizer.step()
        >>> treatment.last.learning_rate, round(treatment.last.gradient_range[1], 3)
        (0.1, 7.071)
    """

    learning_rate: float
    """The rate that the step was taken with."""
    eta: float | None = None
    """The optimal learning rate eta*, where ``olr`` computed one."""
    switched: bool = False
    """Whether eta* was used: ``0 < eta* < lr``."""
    gradient_range: tuple[float, float] | None = None
    """The smallest and the largest singular value of the gradient before ``nog``."""
    gauged: bool = False
    """Whether ``gauge`` replaced the weight."""
    cond_before: float | None = None
    """The condition number on the support of the covariance of the last training batch, where ``gauge`` saw one."""
    cond_after: float | None = None
    """The same for the weight as ``gauge`` left it: ``cond_before`` unless it replaced the weight."""


def parse_treatment(spec: str) -> frozenset[str]:
    """Return the names in a ``+``-joined specification; ``none`` and the empty string are the empty set.

    Raises:
        ArgumentError: a name that is no treatment; the message lists them.

    Example:
        >>> sorted(parse_treatment("nog+ow"))
        ['nog', 'ow']
    """
    names = [name.strip().lower() for name in spec.split("+") if name.strip()]
    if names == ["none"]:
        return frozenset()
    for name in names:
        check_choice(name, TREATMENTS, "treatment", "treat")
    return frozenset(names)


def treat(
    model: nn.Module, layer: str | nn.Module, spec: str, *, example_input: Any = None, **options: Any
) -> "Treatment":
    """Put a treatment on one layer of a model.

    Three lines in a training loop:

        treatment = orthocond.treat(model, "conv1", "nog+ow+olr")    # before the optimizer
        treatment.attach(optimizer)                                  # before the scheduler
        loss = criterion(model(x), y) + treatment.penalty()          # zero without ol

    Args:
        model: the model, also one wrapped by `torch.compile` or, unless ``ow`` or ``sn`` replace the weight, by DDP.
        layer: the Pre-SVD layer: a linear layer or a convolution of any kind, as a module or by its dotted name, or
            ``"auto"`` for the one that `find_pre_svd` finds.
        spec: a ``+``-joined set of `TREATMENTS`, in any order, or ``"none"``.
        example_input: an input of the model, for ``"auto"``, and for ``gauge`` where `torch.fx` can't trace the model.
        **options: ``kind`` (``"kernel"`` or ``"operator"``, for ``ow``, see `orthocond.nn.orthogonal_weight`),
            ``normalize`` (for ``ow``, on unless turned off: with ``nog`` the paper's formula, ``False``, does not train
            well, see docs/orthogonal_weight.md), ``penalty_weight`` (for ``ol``), ``rule``
            (``"paper"`` or ``"exact"``, for ``olr``), ``solver`` (for ``nog``, one of
            `orthocond.linalg.POLAR_SOLVERS`); and for ``gauge``, see docs/gauge.md: ``threshold`` (the condition number
            above which it acts), ``scale`` (what it keeps: the covariance's ``"trace"``, the norm of the ``"weight"``,
            or ``"unit"`` for a covariance that becomes the identity), ``momentum`` (the optimizer's: ``"keep"``,
            ``"reset"`` or ``"transform"``), ``metric`` (a step is measured as if the layer's ``"input"`` were white, or
            in the numbers of the new ``"weight"``), ``process_group`` (the processes with copies of the model, None for
            all).

    Returns:
        The treatment, its weight in place (``sn``, ``ow``), to be attached to the optimizer (``nog``, ``olr``,
        ``gauge``).

    Raises:
        ArgumentError: an unknown treatment, layer or option, a layer without a matrix for a weight; for ``gauge`` a
            constrained weight (``ow``, ``sn``), or anything but whitening without ``eps`` directly behind the layer.

    Warns:
        OrthocondWarning: ``olr`` with exactly one of ``ow`` and ``nog``, where the paper argues that eta* goes to zero;
            with ``rule="exact"`` and an orthogonal kernel, where it is zero up to rounding.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> treat(model, "0", "olr + ow + nog")
        Treatment(layer='0', spec='ow+nog+olr')
    """
    names = parse_treatment(spec)
    for option in options:
        check_choice(option, _OPTIONS, "option", "treat")
    settings = {**_OPTIONS, **options}
    check_choice(settings["kind"], KINDS, "kind", "treat")
    check_choice(settings["rule"], RULES, "rule", "treat")
    check_nonnegative(settings["penalty_weight"], "penalty_weight", "treat")
    resolve(POLAR_SOLVERS, settings["solver"], "solver", "treat")
    if isinstance(model, nn.parallel.DistributedDataParallel) and names & {"ow", "sn"}:
        raise ArgumentError(
            f"treat with {spec!r} replaces a parameter, which DistributedDataParallel would not notice; "
            "treat the model before you wrap it."
        )
    if "gauge" in names and names & {"ow", "sn"}:
        raise ArgumentError(
            f"treat got {spec!r}, but gauge replaces the weight, which ow and sn constrain; use gauge without them."
        )
    model = unwrapped(model)
    if isinstance(layer, str) and layer == "auto":
        layer = _only_pre_svd(model, example_input)
    name, module = _found(model, layer)
    gauge = Gauge(model, name, module, settings, example_input) if "gauge" in names else None
    if "olr" in names and ("ow" in names) != ("nog" in names):
        warnings.warn(
            "olr with only one of ow and nog: the paper argues that the optimal learning rate goes to zero there "
            "(section 5.2); use both or neither.",
            OrthocondWarning,
            stacklevel=2,
        )
    if {"olr", "ow"} <= names and (settings["rule"], settings["kind"]) == ("exact", "kernel"):
        warnings.warn(
            'olr with rule="exact" finds no step that improves on the orthogonal weight of ow, so its rate is rounding '
            'noise around zero; use rule="paper".',
            OrthocondWarning,
            stacklevel=2,
        )
    return Treatment(module, name, names, settings, gauge)


class Treatment:
    """A treatment on a layer, as `treat` makes it.

    The order within a step is: unscale (GradScaler), the user's clipping, ``gauge``, ``nog``, ``olr``, the optimizer's
    step. So ``nog`` and ``olr`` see weight and gradient in the gauge, and the metric, in which the step is taken. The
    learning rate that ``olr`` takes is put back after the step, so schedulers never see it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4, bias=False))
        >>> treatment = treat(model, "0", "ow")
        >>> orthogonal_loss(model[0].weight).item() < 1e-5
        True
        >>> treatment.remove()  # the plain weight again, where it is now
        >>> type(model[0].weight).__name__
        'Parameter'
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        names: Iterable[str],
        options: dict[str, Any],
        gauge: Gauge | None = None,
    ) -> None:
        self._gauge = gauge
        self.layer, self.name, self.names, self.options = layer, name, frozenset(names), dict(options)
        self._layout: dict[str, Any] = {
            "groups": getattr(layer, "groups", 1),
            "transposed": isinstance(layer, nn.modules.conv._ConvTransposeNd),
        }
        self._optimizer: torch.optim.Optimizer | None = None
        self._handles: list[Any] = []
        self._scheduled: Any = None
        self._last: LastStep | None = None
        self._gram: Tensor | None = None
        _ = self.parameter  # one that can be treated
        frozen_weight = not self.parameter.requires_grad
        if "ow" in self.names:
            orthogonal_weight(layer, kind=options["kind"], normalize=options["normalize"])
        if "sn" in self.names:
            spectral_norm(layer, "weight")
        if self.names & {"ow", "sn"} and parametrize.is_parametrized(layer, "weight"):
            # A new object: an optimizer made before holds the old one, which shows when it is attached.
            trained = layer.parametrizations.weight  # type: ignore[union-attr]
            value = trained.original.detach().clone()  # type: ignore[union-attr, operator]
            trained.original = nn.Parameter(value, requires_grad=not frozen_weight)  # type: ignore[union-attr]

    def __repr__(self) -> str:
        return f"Treatment(layer={self.name!r}, spec={self.spec!r})"

    @property
    def spec(self) -> str:
        """The names, in the registry's order."""
        return "+".join(name for name in TREATMENTS if name in self.names) or "none"

    @property
    def parameter(self) -> nn.Parameter:
        """The tensor that is trained: the weight, or what is behind its parametrization."""
        if parametrize.is_parametrized(self.layer, "weight"):
            parameter = getattr(self.layer.parametrizations.weight, "original", None)  # type: ignore[union-attr]
        else:
            parameter = self.layer.weight
        if not isinstance(parameter, nn.Parameter):
            raise ArgumentError(
                f"the weight of {self.name!r} is made of several tensors, and a treatment acts on one; "
                "remove that parametrization first."
            )
        return parameter

    @property
    def last(self) -> LastStep | None:
        """What the last step did; None before the first."""
        if self._last is not None and self._gram is not None:
            squares = torch.linalg.eigvalsh(self._gram).clamp(min=0)
            extremes = (float(squares.min().sqrt()), float(squares.max().sqrt()))
            self._last = replace(self._last, gradient_range=extremes)
            self._gram = None
        return self._last

    def attach(self, optimizer: torch.optim.Optimizer) -> "Treatment":
        """Let the treatment act on the steps of an optimizer; call it before a learning-rate scheduler is made.

        For ``olr`` the parameter gets a group of its own, with the settings of the group that it was in.

        Raises:
            ArgumentError: it is attached already, the optimizer does not hold the parameter, it is LBFGS (which takes
                several steps in one), or a scheduler has been made for the groups that ``olr`` has to split.
        """
        if self._optimizer is not None:
            raise ArgumentError(f"{self!r} is attached to an optimizer already; call detach() first.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentError(
                "LBFGS evaluates many gradients in a step, which a treatment can't act on; use another one."
            )
        group = _group_of(self.parameter, optimizer)
        if group is None:
            raise ArgumentError(
                f"the optimizer does not hold the parameter of {self.name!r} (treated with {self.spec}); "
                "make the optimizer after treat(), from model.parameters()."
            )
        if "olr" in self.names and len(group["params"]) > 1:
            self._split(group, optimizer)
        if self._gauge is not None:
            self._gauge.watch()
        if self.names & {"nog", "olr", "gauge"}:
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_state_dict_pre_hook(self._after_step),  # after a step that failed
            ]
        self._optimizer = optimizer
        return self

    def detach(self) -> None:
        """Stop acting on the optimizer's steps; weight and groups stay as they are."""
        self._put_back()
        if self._gauge is not None:
            self._gauge.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._optimizer = None

    def remove(self) -> None:
        """Detach, and leave the plain weight in place of a parametrized one.

        Raises:
            ArgumentError: ``ow`` with ``kind="operator"``, which no plain weight can replace.
        """
        if isinstance(self.layer, SkewOrthogonalConv2d):
            raise ArgumentError(f"{self!r} is an orthogonal operator, which no plain weight can replace; keep it.")
        self.detach()
        if self.names & {"ow", "sn"} and parametrize.is_parametrized(self.layer, "weight"):
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=True)

    def penalty(self) -> Tensor:
        """Return what ``ol`` adds to the loss: zero without it."""
        if "ol" not in self.names:
            return self.parameter.new_zeros(())
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        matrix = kernel_matrix(weight, **self._layout)
        losses = [orthogonal_loss(group) for group in (matrix if matrix.ndim == 3 else [matrix])]
        total: Tensor = self.options["penalty_weight"] * torch.stack(losses).sum()
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be saved in a checkpoint, plain types and tensors; the weight is in the model's."""
        last = self.last
        return {
            "layer": self.name,
            "spec": self.spec,
            "options": {name: value for name, value in self.options.items() if name != "process_group"},
            "last": None if last is None else dict(last.__dict__),
            "gauge": None if self._gauge is None else self._gauge.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            ArgumentError: it belongs to another treatment or layer.
        """
        own_state = self.state_dict()
        defaults = {name: _OPTIONS[name] for name in own_state["options"]}  # for those that are younger than the state
        if "gauge" in self.names and "gauge" not in state:
            defaults["metric"] = "weight"  # there was no other
        saved, own = ((s["spec"], s["layer"], {**defaults, **s["options"]}) for s in (state, own_state))
        if saved != own:
            raise ArgumentError(
                f"the state is that of {saved[0]} on {saved[1]!r} with {saved[2]}, not of {own[0]} on {own[1]!r} with "
                f"{own[2]}; treat the model as it was when the checkpoint was written."
            )
        last, self._gram = state["last"], None
        self._last = None if last is None else LastStep(**last)
        if self._gauge is not None:
            self._gauge.load_state_dict(state.get("gauge"))  # older states have none

    def _split(self, group: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        if "initial_lr" in group:
            raise ArgumentError(
                f"olr gives the parameter of {self.name!r} a group of its own, and a scheduler has been made for the "
                "groups as they are; attach the treatment before you make the scheduler."
            )
        index = next(i for i, other in enumerate(group["params"]) if other is self.parameter)
        own: Any = group["params"].pop(index)
        if "param_names" in group:  # an optimizer of named parameters
            own = (group["param_names"].pop(index), own)
        settings = {
            key: value.clone() if isinstance(value, Tensor) else value  # a rate that is a tensor is each group's own
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        optimizer.add_param_group({"params": [own], **settings})

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
        group = _group_of(parameter, optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        self._last = self._gram = None
        if group is None or parameter.grad is None or (found_inf is not None and bool(found_inf)):
            return
        lr = group["lr"]
        rate, eta, switched = float(lr), None, False
        # A fused optimizer under GradScaler unscales within its step: what it is given has to be scaled.
        scale = getattr(optimizer, "grad_scale", None)
        scale = 1.0 if scale is None else scale
        gauge, in_between = GaugeStep(), bool(self.names & {"nog", "olr"})
        if self._gauge is not None:
            gauge = self._gauge.step(optimizer)
            self._gauge.measure_(parameter.grad, root=in_between)
        if "nog" in self.names:
            nearest = nearest_orthogonal_gradient(parameter, solver=self.options["solver"], **self._layout)
            assert nearest is not None
            matrix = widen(kernel_matrix(parameter.grad, **self._layout)) / scale
            self._gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
            parameter.grad.copy_(nearest * scale)
        if "olr" in self.names:
            eta = self._optimal_rate(parameter.grad / scale, rate)
            switched = 0 < eta < rate
            if switched:
                group["lr"] = torch.full_like(lr, eta) if isinstance(lr, Tensor) else eta
                self._scheduled = (group, lr, group["lr"])
                rate = eta
        if self._gauge is not None and in_between:
            self._gauge.measure_(parameter.grad, root=True)
        self._last = LastStep(rate, eta, switched, None, *gauge)

    def _optimal_rate(self, gradient: Tensor, rate: float) -> float:
        """Return eta* for the weight as the layer uses it: for an orthogonal kernel it is the orthogonal one."""
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        if self._gauge is not None:
            weight = self._gauge.measured(weight)
        W, G = (kernel_matrix(part, **self._layout) for part in (weight, gradient))
        return rate_for_matrices(W, G, self.options["rule"], rate if self.options["rule"] == "exact" else math.inf)

    def _after_step(self, *_: Any) -> None:
        self._put_back()

    def _put_back(self) -> None:
        """Put the scheduled learning rate back."""
        if self._scheduled is None:
            return
        group, lr, taken = self._scheduled
        if group["lr"] is taken:  # else somebody has set another one since, after a step that failed
            group["lr"] = lr
        self._scheduled = None


def _only_pre_svd(model: nn.Module, example_input: Any) -> str:
    if example_input is None:
        raise ArgumentError("treat with layer='auto' needs an example_input; pass one batch of the model's input.")
    layers = set[str]()
    for meta, feeds in find_pre_svd(model, example_input).items():
        if isinstance(feeds, Join):
            raise ArgumentError(f"the meta-layer {meta!r} is fed by several layers: {feeds}; treat each by its name.")
        layers.add(feeds)
    if len(layers) > 1:
        raise ArgumentError(
            f"the model has several Pre-SVD layers ({', '.join(sorted(layers))}); treat each by its name."
        )
    return layers.pop()


def _found(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Return name and module of the layer to treat."""
    modules = dict(model.named_modules())
    if isinstance(layer, nn.Module):
        name = next((name for name, module in modules.items() if module is layer), None)
        if name is None:
            raise ArgumentError(f"the layer {layer} is not in the model; pass one of its modules or a dotted name.")
    else:
        modules |= {name.replace("_orig_mod.", ""): module for name, module in modules.items()}  # compiled parts
        name = layer.replace("_orig_mod.", "").removeprefix("module.") if layer not in modules else layer
        if name not in modules:
            check_choice(name, [other for other, module in modules.items() if has_matrix(module)], "layer", "treat")
    module = modules[name]
    if not has_matrix(module):
        raise ArgumentError(
            f"the layer {name!r} ({type(module).__name__}) has no matrix for a weight; "
            "treat a linear layer or a convolution."
        )
    return name, module


def _group_of(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Return the optimizer's group that holds this very parameter."""
    for group in optimizer.param_groups:
        if any(other is parameter for other in group["params"]):
            return group
    return None
