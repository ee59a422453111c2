"""Watching the condition number of every meta-layer while a model trains."""

from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from orthocond._core.compiling import HookNotice, uncompiled
from orthocond.errors import ArgumentError
from orthocond.graph import unwrapped
from orthocond.linalg import solver_failures
from orthocond.linalg._spectrum import spectrum_of
from orthocond.nn._meta import MetaLayer

__all__ = ["ConditionMonitor"]

_NUMBERS = ("cond", "cond_support", "cond_eps", "rank")


class Writer(Protocol):
    """What `ConditionMonitor.log` needs of TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Write one number."""


class ConditionMonitor:
    """Records rank and condition numbers of every meta-layer, one record for each training forward.

    The eigenvalues are those that the layers have anyway, and nothing waits for the device until the history is read.
    A layer that decomposes several matrices at a time (groups, or images) is recorded by the worst of them.

    Args:
        model: with at least one meta-layer of `orthocond.nn`.
        every: record each layer's every so many-th training forward.

    Raises:
        ArgumentError: the model has no meta-layer, or ``every`` is below 1.

    Example:
        >>> from orthocond.nn import DecorrelatedBatchNorm2d
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), DecorrelatedBatchNorm2d(8))
        >>> with ConditionMonitor(model) as monitor:
        ...     _ = model(torch.randn(4, 3, 9, 9))
        >>> (record,) = monitor.history()
        >>> sorted(record)
        ['cond', 'cond_eps', 'cond_support', 'failures', 'layer', 'rank', 'step']
    """

    def __init__(self, model: nn.Module, every: int = 1) -> None:
        if every < 1:
            raise ArgumentError(f"ConditionMonitor expected every >= 1, got {every}.")
        model = unwrapped(model)
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, MetaLayer)}
        if not layers:
            raise ArgumentError(
                "ConditionMonitor found no meta-layer in the model; put one in, e.g. by orthocond.nn.convert_batchnorm."
            )
        self.every = every
        self._layers = layers
        self._forwards = dict.fromkeys(layers, 0)
        self._failures_before = dict.fromkeys(layers, 0)
        self._pending: list[tuple[int, str, Tensor, int]] = []
        self._records: list[dict[str, Any]] = []
        self._latest: dict[str, dict[str, Any]] = {}
        self._handles: list[Any] = []
        for name, layer in layers.items():
            self._handles.append(layer.register_forward_pre_hook(partial(self._before, name)))
            self._handles.append(layer.register_forward_hook(partial(self._after, name)))
            self._handles.append(HookNotice(layer))

    def history(self) -> list[dict[str, Any]]:
        """Return all records, oldest first, as plain dicts.

        ``step`` counts the layer's training forwards from 0, ``layer`` is its dotted name, ``failures`` how many
        attempts at its decomposition did not converge; ``cond``, ``cond_support``, ``cond_eps`` and ``rank`` are as in
        `orthocond.linalg.spectrum`, with the layer's own ``eps`` and ``rtol``.
        """
        if self._pending:
            values = torch.stack([numbers for _, _, numbers, _ in self._pending]).tolist()
            for (step, layer, _, failures), numbers in zip(self._pending, values, strict=True):
                named = dict(zip(_NUMBERS, numbers, strict=True))
                record = {"step": step, "layer": layer, **named, "rank": int(named["rank"]), "failures": failures}
                self._records.append(record)
                self._latest[layer] = record
            self._pending.clear()
        return list(self._records)

    def drain(self) -> list[dict[str, Any]]:
        """Return all records as `history` does, and forget them: for a long run that writes them down itself."""
        records = self.history()
        self._records.clear()
        return records

    def latest(self) -> dict[str, dict[str, Any]]:
        """Return the newest record of each layer."""
        self.history()
        return dict(self._latest)

    def log(self, writer: Writer, step: int) -> None:
        """Write the newest record of each layer as ``condition/<layer>/<number>`` at ``step``."""
        for layer, record in self.latest().items():
            for name in (*_NUMBERS, "failures"):
                writer.add_scalar(f"condition/{layer}/{name}", record[name], step)

    def close(self) -> None:
        """Stop recording; the history stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @uncompiled
    def _before(self, name: str, *_: Any) -> None:
        self._failures_before[name] = _num_failures()

    @uncompiled
    @torch.no_grad()
    def _after(self, name: str, layer: nn.Module, *_: Any) -> None:
        if layer is not self._layers[name] or not layer.training:  # a copy of the model has a copy of the hook
            return
        assert isinstance(layer, MetaLayer)
        step = self._forwards[name]
        self._forwards[name] += 1
        eigenvalues = layer.last_eigenvalues if step % self.every == 0 else None
        if eigenvalues is None:
            return
        rounding = eigenvalues.shape[-1] * torch.finfo(torch.float32).eps
        found = spectrum_of(eigenvalues, eps=layer.eps, rtol=rounding if layer.rtol is None else layer.rtol)
        worst = [found.cond.max(), found.cond_support.max(), found.cond_eps.max(), found.rank.min()]
        numbers = torch.stack([number.to(eigenvalues.dtype) for number in worst])
        self._pending.append((step, name, numbers, _num_failures() - self._failures_before[name]))


def _num_failures() -> int:
    return sum(solver_failures().values())
