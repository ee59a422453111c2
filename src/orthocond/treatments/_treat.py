"""Applying a treatment to a layer of a model."""

from typing import Any, Literal, overload
from warnings import warn

from torch import nn

from orthocond.errors import ArgumentError, OrthocondWarning, check_choice, check_module
from orthocond.graph import Join, find_pre_svd, has_matrix, unwrapped
from orthocond.treatments._group import TreatmentGroup
from orthocond.treatments._host import Treatment
from orthocond.treatments._part import renewed
from orthocond.treatments._restored import restored_on_failure
from orthocond.treatments._spec import Specification, check_flat_options, parse
from orthocond.treatments._target import Target

__all__ = ["treat"]


@overload
def treat(
    model: nn.Module, layer: Literal["all"], spec: Specification, *, example_input: Any = None, **options: Any
) -> TreatmentGroup: ...
@overload
def treat(
    model: nn.Module, layer: str | nn.Module, spec: Specification, *, example_input: Any = None, **options: Any
) -> Treatment: ...
def treat(
    model: nn.Module, layer: str | nn.Module, spec: Specification, *, example_input: Any = None, **options: Any
) -> Treatment | TreatmentGroup:
    """Apply a treatment to one layer of a model.

    Three lines in a training loop:

        treatment = orthocond.treat(model, "conv1", "nog+ow+olr")    # before the optimizer
        treatment.attach(optimizer)                                  # any optimizer of torch
        loss = criterion(model(x), y) + treatment.penalty()          # zero without ol

    An error leaves the model as it was.

    Args:
        model: the model. It may be wrapped by `torch.compile` or, unless ``ow`` or ``sn`` replace the weight, by DDP.
        layer: the Pre-SVD layer: a linear layer or a convolution of any kind, as a module or by its dotted name, or
            ``"auto"`` for the one that `find_pre_svd` finds. Where it finds several, ``"first"`` takes the first, and
            ``"all"`` treats them all and returns a `TreatmentGroup`.
        spec: names of `TREATMENTS` joined by ``+``, in any order, each with its options in parentheses:
            ``"nog(solver=svd)+ow(kind=operator)+olr"``; ``"none"``; or a list of such strings and instances of `Part`:
            ``["ow", MyPart(scale=0.1)]``.
        example_input: an input of the model, for ``"auto"``, ``"first"`` and ``"all"``, and for ``gauge`` where
            `torch.fx` can't trace the model.
        **options: not accepted; the error shows how to write the option in the specification.

    Returns:
        The treatment. ``sn`` and ``ow`` have already replaced the weight; ``nog``, ``olr`` and ``gauge`` act once it
        is attached to the optimizer.

    Raises:
        ArgumentError: an unknown treatment, layer or option, or a layer whose weight is not a matrix; for ``gauge`` a
            constrained weight (``ow``, ``sn``), or anything but whitening without ``eps`` directly after the layer.

    Warns:
        OrthocondWarning: ``olr`` with exactly one of ``ow`` and ``nog``, where the paper argues that eta* goes to zero;
            with ``rule=exact`` and an orthogonal kernel, where it is zero up to rounding. Later, in training: a
            treatment that was not attached, a penalty that was not added to the loss.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> treat(model, "0", "olr + ow + nog(solver=svd)")
        Treatment(layer='0', spec='nog(solver=svd)+ow+olr')
    """
    check_module(model, "treat")
    parts = parse(spec)
    if options:
        check_flat_options(parts, options)
    replacing = [part.name for part in parts if part.replaces_weight]
    if isinstance(model, nn.parallel.DistributedDataParallel) and replacing:
        raise ArgumentError(
            f"treat with {'+'.join(replacing)} replaces a parameter, which DistributedDataParallel would not notice; "
            "treat the model before you wrap it."
        )
    model = unwrapped(model)
    layers: list[str | nn.Module] = [layer]
    is_found = isinstance(layer, str) and layer in ("auto", "first", "all") and layer not in dict(model.named_modules())
    if is_found:
        layers = [*_pre_svd_layers(model, str(layer), example_input)]
    targets = [Target(model, *_found(model, each)) for each in layers]
    parameters = [target.parameter for target in targets]
    treatments: list[Treatment] = []
    with restored_on_failure(targets, parts):
        for target in targets:
            target.example_input = example_input
            treatments.append(Treatment(target, map(renewed, parts) if len(targets) > 1 else parts))
        for message in dict.fromkeys(message for target in targets for message in target.warnings):
            warn(message, OrthocondWarning, stacklevel=2)
    for treatment, before in zip(treatments, parameters, strict=True):
        treatment._expect_use(before)
    return TreatmentGroup(treatments) if is_found and layer == "all" else treatments[0]


def _pre_svd_layers(model: nn.Module, which: str, example_input: Any) -> list[str]:
    if example_input is None:
        raise ArgumentError(f"treat with layer={which!r} needs an example_input; pass one batch of the model's input.")
    found = find_pre_svd(model, example_input)
    layers = list(dict.fromkeys(name for feeds in found.values() for name in _names(feeds)))
    if len(layers) > 1 and which == "auto":
        joins = [
            f"the meta-layer {meta!r} is fed by several layers: {feeds}"
            for meta, feeds in found.items()
            if isinstance(feeds, Join)
        ]
        reason = "; ".join(joins) or f"the model has several Pre-SVD layers ({', '.join(layers)})"
        raise ArgumentError(f"{reason}; treat each by its name, or pass layer='first' or layer='all'.")
    return layers if which == "all" else layers[:1]


def _names(feeds: str | Join) -> tuple[str, ...]:
    return feeds.layers if isinstance(feeds, Join) else (feeds,)


def _found(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Return name and module of the layer to treat."""
    modules = dict(model.named_modules())
    if isinstance(layer, nn.Module):
        name = next((name for name, module in modules.items() if module is layer), None)
        if name is None:
            raise ArgumentError(f"the layer {layer} is not in the model; pass one of its modules or a dotted name.")
    else:
        if not isinstance(layer, str):
            raise ArgumentError(
                f"treat expected a layer as a module or by its dotted name, got {type(layer).__name__}; pass e.g. "
                f"{next((name for name, module in modules.items() if has_matrix(module)), 'conv1')!r}."
            )
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
