"""Running statistics for the current weights, not for those during training."""

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from orthocond.errors import ArgumentError, OrthocondWarning, check_module
from orthocond.nn._norm import _DecorrelatedBatchNorm

__all__ = ["renew_statistics"]


@torch.no_grad()
def renew_statistics(module: nn.Module, batches: Iterable[Any], *, device: torch.device | str | None = None) -> None:
    """Recompute the running statistics of every norm over ``batches``, with fixed weights.

    Running statistics are averages over the last batches of the training, during which the weights changed. The
    whitening of a singular covariance changes with them, so a network may train well and test badly. Averaged weights
    (SWA, EMA) have no running statistics of their own at all. This function resets the running statistics of all
    decorrelated and plain batch norms and replaces them by their means over ``batches``, as
    `torch.optim.swa_utils.update_bn` does for plain ones.

    Meanwhile only the norms are in training mode. Everything else is in eval mode, so the statistics are those of the
    network that will be evaluated, without dropout. Modes and momenta are restored at the end. If a batch fails, the
    old statistics are restored as well.

    Args:
        module: a model, changed in place.
        batches: inputs of the model, e.g. a data loader of the training data; 100 batches are usually enough. The
            model gets a tensor unchanged, the first element of a tuple or a list, or a dict as keyword arguments,
            without keys that ``forward`` doesn't accept.
        device: the device to move the inputs to; ``None`` doesn't move them.

    Raises:
        ArgumentError: there is no batch, or ``batches`` is a single one.

    Example:
        >>> from orthocond.nn import DecorrelatedBatchNorm2d
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), DecorrelatedBatchNorm2d(8)).eval()
        >>> renew_statistics(model, (torch.randn(16, 3, 9, 9) for _ in range(10)))
        >>> model[1].num_batches_tracked
        tensor(10)
    """
    check_module(module, "renew_statistics")
    if isinstance(batches, Tensor | Mapping):
        raise ArgumentError(
            f"renew_statistics expected an iterable of batches, got one {type(batches).__name__}; pass a list, [batch]."
        )
    norms = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _DecorrelatedBatchNorm | _BatchNorm)
        and layer.running_mean is not None
        and layer.track_running_stats
    }
    if not norms:
        warnings.warn(
            "renew_statistics found no norm with running statistics in the model; nothing was changed.",
            OrthocondWarning,
            stacklevel=3,
        )
        return
    modes = {layer: layer.training for layer in module.modules()}
    momenta = {norm: norm.momentum for norm in norms.values()}
    before: dict[nn.Module, list[Tensor]] = {
        norm: [buffer.clone() for buffer in norm.buffers(recurse=False)] for norm in momenta
    }
    try:
        for layer in modes:
            layer.training = layer in momenta
        for norm in momenta:
            norm.reset_running_stats()
            norm.momentum = None  # a mean over all batches
        _run(module, batches, device)
    except BaseException:
        _restore(before)
        raise
    finally:
        for layer, mode in modes.items():
            layer.training = mode
        for norm, momentum in momenta.items():
            norm.momentum = momentum
    unused = {name: norm for name, norm in norms.items() if not norm.num_batches_tracked}
    if unused:
        _restore({norm: before[norm] for norm in unused.values()})
        warnings.warn(
            f"renew_statistics left {', '.join(unused)} unchanged: no batch went through there in eval mode.",
            OrthocondWarning,
            stacklevel=3,
        )


def _run(module: nn.Module, batches: Iterable[Any], device: torch.device | str | None) -> None:
    num_batches = 0
    for num_batches, batch in enumerate(batches, start=1):  # noqa: B007  (counted for the check behind)
        if isinstance(batch, Mapping):
            module(**{name: _moved(value, device) for name, value in _arguments(module, batch).items()})
        else:
            module(_moved(batch[0] if isinstance(batch, tuple | list) else batch, device))
    if not num_batches:
        raise ArgumentError(
            "renew_statistics got no batch; pass a data loader or a list of inputs. A generator that has been used up "
            "gives none."
        )


def _arguments(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``forward`` that a batch contains."""
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(batch)
    arguments = {name: value for name, value in batch.items() if name in parameters}
    if not arguments:
        raise ArgumentError(
            f"renew_statistics got a batch with the keys {', '.join(map(str, batch))}, but the model's arguments are "
            f"{', '.join(parameters)}; pass the inputs themselves, e.g. (batch['image'] for batch in loader)."
        )
    return arguments


def _moved(value: Any, device: torch.device | str | None) -> Any:
    return value.to(device) if device is not None and isinstance(value, Tensor) else value


def _restore(statistics: Mapping[nn.Module, list[Tensor]]) -> None:
    for norm, values in statistics.items():
        for buffer, value in zip(norm.buffers(recurse=False), values, strict=True):
            buffer.copy_(value)
