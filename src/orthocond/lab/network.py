"""The network of a configuration, with the treatment on its Pre-SVD layer."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from orthocond import find_pre_svd, treat
from orthocond.errors import OrthocondWarning
from orthocond.lab.config import Config, solver_of
from orthocond.lab.data import Data, Part
from orthocond.lab.methods import method
from orthocond.lab.models import build
from orthocond.treatments import Treatment

__all__ = ["network", "pre_svd_parameters"]


def network(config: Config, data: Data, *, sync: bool) -> tuple[nn.Module, Treatment | None]:
    """Return the network of a configuration, and the treatment on its Pre-SVD layer, if it has one."""
    chosen = method(config.method, config.parts)
    options: dict[str, Any] = {}
    if chosen.solver is not None:
        options = {"solver": solver_of(config)}
        # What Newton-Schulz iterates on has no eigenvalues to drop, nor to make a rule of.
        names = ("eps", "rtol", "gradient") if chosen.solver == "eigh" else ("eps",)
        options |= {name: getattr(config, name) for name in names if getattr(config, name) is not None}
        options |= chosen.options
        if config.meta == "dbn":
            options["sync"] = sync
    with_meta = chosen.solver is not None
    model = build(
        config.model,
        channels=data.channels,
        num_classes=config.num_classes,
        small_images=config.small_images,
        stem="dbn" if with_meta and config.meta == "dbn" else "bn",
        head="covariance" if with_meta and config.meta == "gcp" else "average",
        width=config.width,
        reduction=config.reduction,
        last_stride=config.last_stride,
        **options,
    )
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a stub that lacks it
    if chosen.treatment == "none":
        return model, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrthocondWarning)  # a combination that was asked for by its name
        return model, treat(model, "auto", chosen.treatment, example_input=_example(data))


def pre_svd_parameters(model: nn.Module, data: Data) -> list[nn.Parameter]:
    """Return the parameters of the layers whose output the network's meta-layer decomposes."""
    layers = [
        name
        for feeding in find_pre_svd(model, _example(data)).values()
        for name in ((feeding,) if isinstance(feeding, str) else feeding.layers)
    ]
    return [parameter for name in layers for parameter in model.get_submodule(name).parameters()]


def _example(data: Data) -> Tensor:
    images, _ = next(iter(data.val_batches(Part(), torch.device("cpu"))))
    return images[:2]
