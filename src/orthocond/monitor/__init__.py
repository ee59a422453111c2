"""Watching the condition number of covariances while a model trains."""

import html
import math
import warnings
from collections import Counter
from collections.abc import Iterable
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeGuard

import torch
from torch import Tensor, nn

from orthocond._core.applying import is_plain
from orthocond._core.compiling import HookNotice, uncompiled
from orthocond._core.observing import Observation
from orthocond._core.precision import widen
from orthocond._core.private import graph_task_id, transforms_are_seen
from orthocond.errors import (
    ArgumentError,
    NonFiniteError,
    OrthocondWarning,
    SolverError,
    check_choice,
    check_module,
    check_nonnegative,
)
from orthocond.graph import tensors, unwrapped
from orthocond.linalg import covariance, solver_failures, spectrum
from orthocond.linalg._covariance import noise_floor, trace
from orthocond.monitor._calls import NOTHING_TO_WATCH, Callers
from orthocond.monitor._measured import CONDITIONS, NUMBERS, Estimated, Key, Measured, Reading, cells, numbers
from orthocond.nn import MetaLayer

__all__ = ["ConditionMonitor"]

_RTOL = 1e-5
_LARGEST_BUFFER = 2**17  # eigenvalues that wait for being reduced to numbers


class Writer(Protocol):
    """What `ConditionMonitor.log` needs of TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Write one number."""


class ConditionMonitor:
    r"""Records rank and condition numbers of covariances, one record for each watched layer and training forward.

    It watches every meta-layer, calls of `orthocond.linalg.matrix_inv_sqrth` and the other spectral functions in the
    code of the model's modules, and the ``layers`` that you name: any module whose input is a feature map, such as a
    plain BatchNorm. For meta-layers and calls the eigenvalues are computed anyway, and nothing waits for the
    device until the history is read. Whitening with ``solver="products"`` computes none: its records are the solver's
    own estimates, and say so, see ``exact_every``. For a named layer the monitor computes the covariance of the input
    over batch and positions, in float64, and decomposes it: that costs about as much as a whitening layer, see
    ``every``. Name a meta-layer to have its covariance in float64, too: eigenvalues below the rounding of float32 count
    in ``cond_floor``.

    A record is a dict:

    | key | what it is |
    | --- | --- |
    | ``step`` | how many training forwards of the layer came before |
    | ``layer`` | the layer's dotted name; for a call, the module's name and the function: ``"head:matrix_sqrth"`` |
    | ``mode`` | ``"train"`` or ``"eval"`` |
    | ``cond`` | the largest eigenvalue over the smallest, both as absolute values |
    | ``cond_support`` | the largest over the smallest of those that count towards the rank |
    | ``cond_eps`` | the condition number with the layer's own ``eps``, where it has one: added, or as a floor |
    | ``cond_floor`` | the condition number with eigenvalues raised to at least 2.2e-16, as in the paper's code |
    | ``rank`` | how many eigenvalues are above ``rtol`` times the largest |
    | ``failures`` | decompositions in this forward that did not converge at the first attempt, in this process |
    | ``estimated`` | whether the numbers are estimates, at most a few percent too low; NaN where there is none |

    A layer that decomposes several matrices at a time (groups, or one for each image) is recorded by the worst of them.
    Covariances are those of the batch of this process; a layer with ``sync=True`` has one for all processes. Calls
    inside a compiled region are not seen.

    Args:
        model: any model, also one wrapped by `torch.compile` or DDP.
        every: record every ``every``-th forward of each layer.
        layers: dotted names of further layers whose input is watched. Channels are in dimension 1, as for convolutions
            and BatchNorm, or in the last one for `nn.Linear`, `nn.LayerNorm`, `nn.RMSNorm` and `nn.MultiheadAttention`.
        rtol: the cut for ``rank`` and ``cond_support``, the same for every layer, whatever its solver and its own
            ``rtol``, so that the numbers can be compared. ``None`` means 1e-5: above the rounding noise of a float32
            covariance, so ``cond_support`` is at most 1e5. Pass the layers' own ``rtol`` to see what they divide by.
        evaluation: record forwards in eval mode, too. A meta-layer's covariance is then computed as for a named layer.
        eps: for ``cond_eps``, the same for every layer; ``None`` means each layer's own.
        exact_every: decompose for the record of every ``exact_every``-th forward where the solver only gives
            estimates: ``solver="products"``. ``None`` never does. Estimates of ``cond_support`` and ``rank`` are for
            the solver's own cut (``dropped``), whatever ``rtol`` is.

    Raises:
        ArgumentError: no model, an unknown layer, ``every`` or ``exact_every`` below 1, or a negative ``rtol`` or
            ``eps``.

    Warns:
        OrthocondWarning: there is no record because all forwards were in eval mode, or nothing to watch in the model.

    Example:
        >>> from orthocond.nn import DecorrelatedBatchNorm2d
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), DecorrelatedBatchNorm2d(8), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
        >>> with ConditionMonitor(model, layers=["3"]) as monitor:
        ...     _ = model(torch.randn(4, 3, 9, 9))
        >>> for record in monitor.history():
        ...     print(record["step"], record["layer"], record["mode"], record["rank"], record["failures"])
        0 1 train 8 0
        0 3 train 4 0
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 1,
        *,
        layers: Iterable[str] | None = None,
        rtol: float | None = None,
        evaluation: bool = False,
        eps: float | None = None,
        exact_every: int | None = None,
    ) -> None:
        check_module(model, "ConditionMonitor")
        if every < 1:
            raise ArgumentError(f"ConditionMonitor expected every >= 1, got {every}; pass 1 to record each forward.")
        if exact_every is not None and exact_every < 1:
            raise ArgumentError(
                f"ConditionMonitor expected exact_every >= 1, got {exact_every}; pass 1 to make each record exact, or "
                "None for estimates."
            )
        self.exact_every = exact_every
        self.every, self.rtol, self.evaluation, self.eps = every, _RTOL if rtol is None else rtol, evaluation, eps
        check_nonnegative(self.rtol, "rtol", "ConditionMonitor")
        if eps is not None:
            check_nonnegative(eps, "eps", "ConditionMonitor")
        self._layers, self._named = _watched(unwrapped(model), [layers] if isinstance(layers, str) else layers or ())
        self._callers = Callers(unwrapped(model))
        self._forwards: Counter[tuple[str, str]] = Counter()
        self._measured: dict[str, Measured | Estimated | None] = {}
        self._failures_before: dict[str, int] = {}
        self._readings: list[Reading] = []
        self._num_waiting = 0
        self._reduced: list[tuple[Key, Tensor]] = []
        self._records: list[dict[str, Any]] = []
        self._newest: dict[tuple[str, str], dict[str, Any]] = {}
        self._num_records: Counter[tuple[str, str]] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()
        self._warned: set[str] = set()
        self._handles: list[Any] = []
        for name, layer in self._layers.items():
            self._handles.append(layer.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(partial(self._after, name)))
            self._handles.append(HookNotice(layer))
        self._handles.append(Observation(self._called))

    def resume(self, num_forwards: int) -> None:
        """Count training forwards from a number on: a resumed run then records the steps that it would have recorded.

        Args:
            num_forwards: how many training forwards there were before, of every layer.
        """
        for name in self._layers:
            self._forwards[name, "train"] = num_forwards

    def history(self) -> list[dict[str, Any]]:
        """Return all records, oldest first, as plain dicts."""
        self._read()
        self._warn_if_silent()
        return list(self._records)

    def drain(self) -> list[dict[str, Any]]:
        """Return all records as `history` does, and forget them: for a long run that writes them down itself."""
        records = self.history()
        self._records.clear()
        return records

    def latest(self) -> dict[str, dict[str, Any]]:
        """Return the newest training record of each layer; for a layer without one, the newest in eval mode."""
        self._read()
        self._warn_if_silent()
        order = sorted(self._newest, key=lambda key: key[1] == "train")
        newest = {layer: self._newest[layer, mode] for layer, mode in order}
        return {layer: newest[layer] for layer in (*self._layers, *newest) if layer in newest}

    def log(self, writer: Writer, step: int) -> None:
        """Write the newest records as ``condition/<layer>/<number>``, those in eval mode as ``condition/eval/...``."""
        self._read()
        self._warn_if_silent()
        for (layer, mode), record in self._newest.items():
            for name in (*NUMBERS, "failures"):
                if not (record["estimated"] and math.isnan(record[name])):
                    writer.add_scalar(f"condition/{'eval/' * (mode == 'eval')}{layer}/{name}", record[name], step)

    def plot(self, ax: Any = None, *, number: str = "cond_support") -> Any:
        """Draw a number of all records over the steps, a line for each layer and mode; needs matplotlib.

        Args:
            ax: the axes of matplotlib to draw on; ``None`` makes new ones.
            number: ``"cond"``, ``"cond_support"``, ``"cond_eps"``, ``"cond_floor"`` or ``"rank"``.

        Returns:
            The axes.

        Raises:
            ArgumentError: an unknown number.
            ImportError: matplotlib is not installed.
        """
        check_choice(number, NUMBERS, "number", "ConditionMonitor.plot")
        if ax is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError:
                raise ImportError(
                    "ConditionMonitor.plot needs matplotlib; run: pip install matplotlib, or draw history() yourself."
                ) from None
            ax = plt.figure().add_subplot()
        records = self.history()
        for layer, mode in self._num_records:
            own = [record for record in records if (record["layer"], record["mode"]) == (layer, mode)]
            values = [record[number] if math.isfinite(record[number]) else math.nan for record in own]
            style = {"linestyle": "none", "marker": "."} if mode == "eval" else {}
            ax.plot([record["step"] for record in own], values, label=f"{layer} ({mode})", **style)
        if number in CONDITIONS:
            ax.set_yscale("log")
        if self._num_records:
            ax.legend()
        ax.set_xlabel("step")
        ax.set_ylabel(number)
        return ax

    def close(self) -> None:
        """Stop recording; the history stays."""
        self._remove_hooks()
        self._warn_if_silent()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_hooks()
        if kind is None:
            self._warn_if_silent()

    def __repr__(self) -> str:
        return f"ConditionMonitor(layers={list(self._layers)!r}, every={self.every}, rtol={self.rtol})"

    def __str__(self) -> str:
        head, rows = self._table()
        if not rows:
            return f"{self!r}: no records yet"
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        texts = (True, True, *(False for _ in head[2:]))  # layer and mode are texts, the others numbers
        lines = [
            "  ".join(
                cell.ljust(width) if is_text else cell.rjust(width)
                for cell, width, is_text in zip(row, widths, texts, strict=True)
            )
            for row in (head, *rows)
        ]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head, rows = self._table()
        if not rows:
            return f"<p>{html.escape(str(self))}</p>"
        lines = ["".join(f"<th>{name}</th>" for name in head)]
        lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return head and rows: the newest record of each layer and mode, and the sum of its failures."""
        self._read()
        self._warn_if_silent()
        rows = [
            [key[0], key[1], str(self._num_records[key]), str(record["step"]), *cells(record), str(self._failures[key])]
            for key, record in self._newest.items()
        ]
        return ["layer", "mode", "records", "last step", "rank", *CONDITIONS, "failures"], rows

    def _read(self) -> None:
        """Turn what was measured into records; here, and only here, the host waits for the device."""
        self._reduce()
        kinds = {(row.device, row.dtype) for _, row in self._reduced}
        values = {
            kind: iter(torch.stack([row for _, row in self._reduced if (row.device, row.dtype) == kind]).tolist())
            for kind in kinds
        }
        for (step, layer, mode, failures, estimated), row in self._reduced:
            found = dict(zip(NUMBERS, next(values[row.device, row.dtype]), strict=True))
            found["rank"] = int(found["rank"])
            record = {"step": step, "layer": layer, "mode": mode, **found, "failures": failures, "estimated": estimated}
            self._records.append(record)
            self._newest[layer, mode] = record
            self._num_records[layer, mode] += 1
            self._failures[layer, mode] += failures
        self._reduced.clear()

    def _warn_if_silent(self) -> None:
        """Warn, once, where nothing was recorded: nothing to watch, or the model was in eval mode all the time."""
        if not self._layers and not self._forwards:
            self._warn(NOTHING_TO_WATCH)
        if self._forwards and not self.evaluation and all(mode == "eval" for _, mode in self._forwards):
            self._warn(
                "ConditionMonitor recorded nothing: every forward was in eval mode, and it records training forwards; "
                "call model.train() before, or pass evaluation=True."
            )

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, OrthocondWarning, stacklevel=4)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @uncompiled
    @torch.no_grad()
    def _before(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if layer is not self._layers[name]:  # a copy of the model has a copy of the hook
            return
        self._failures_before.pop(name, None)  # of a forward that raised
        if transforms_are_seen() or graph_task_id() != -1:  # torch.func, or a checkpoint repeats a forward
            return
        is_due = self._is_due(name, layer) and not self._has_own(layer, name)
        self._measured[name] = self._of_input(name, layer, tensors((args, kwargs))) if is_due else None
        self._failures_before[name] = _num_failures()

    @uncompiled
    @torch.no_grad()
    def _after(self, name: str, layer: nn.Module, *_: Any) -> None:
        if layer is not self._layers[name] or name not in self._failures_before:
            return
        failures = _num_failures() - self._failures_before.pop(name)
        measured, is_due = self._measured.pop(name), self._is_due(name, layer)
        mode = _mode(layer)
        step = self._forwards[name, "train"]
        self._forwards[name, mode] += 1
        if is_due and self._has_own(layer, name):
            measured = self._of_layer(layer, step)
        if measured is None or measured[0].numel() == 0:
            return
        if isinstance(measured, Measured) and isinstance(layer, MetaLayer):
            measured = measured._replace(clamp=layer.clamp)
        eps = getattr(layer, "eps", None) if self.eps is None else self.eps
        key = Key(step, name, mode, failures, isinstance(measured, Estimated))
        self._wait(key, measured, eps if isinstance(eps, int | float) else 0.0)

    def _of_layer(self, layer: MetaLayer, step: int) -> Measured | Estimated | None:
        """Return what the layer itself knows of its last training batch; None before one."""
        is_exact = self.exact_every is not None and step % self.exact_every == 0
        if not is_exact and (estimates := layer.last_estimates) is not None:
            return Estimated(*estimates, layer.eps)
        if layer.last_eigenvalues is None:
            return None
        noise = layer.last_noise  # a compiled layer may use the same memory again
        return Measured(layer.last_eigenvalues.clone(), None if noise is None else noise.clone())

    def _wait(self, key: Key, measured: Measured | Estimated, eps: float) -> None:
        """Put a reading with those that wait for being reduced to numbers."""
        self._readings.append((key, measured, eps))
        self._num_waiting += measured[0].numel()
        if self._num_waiting > _LARGEST_BUFFER:
            self._reduce()

    def _has_own(self, layer: nn.Module, name: str) -> TypeGuard[MetaLayer]:
        """Return whether the eigenvalues are there after a forward because the layer itself needs them."""
        return isinstance(layer, MetaLayer) and layer.training and name not in self._named

    @torch.no_grad()
    def _called(self, function: str, A: Tensor, eigenvalues: Tensor | None, eps: float, clamp: bool) -> None:
        """Record a call of a spectral function in a module's code; those of meta-layers are recorded with the layer."""
        is_repeated = graph_task_id() != -1  # by a checkpoint, in the backward pass
        if function[0].isupper() or is_repeated or not A.numel() or (place := self._callers.place(function)) is None:
            return
        name, module = place
        is_due, mode = self._is_due(name, module), _mode(module)
        key = Key(self._forwards[name, "train"], name, mode, 0)
        self._forwards[name, mode] += 1
        if is_due:
            l = spectrum(A.detach()).eigenvalues if eigenvalues is None else eigenvalues.detach().flip(-1)
            self._wait(key, Measured(l, clamp=clamp), eps if self.eps is None else self.eps)

    def _is_due(self, name: str, layer: nn.Module) -> bool:
        mode = _mode(layer)
        return (mode == "train" or self.evaluation) and self._forwards[name, mode] % self.every == 0

    def _of_input(self, name: str, layer: nn.Module, inputs: list[Tensor]) -> "Measured | None":
        """Return the eigenvalues of the covariance of a layer's input, in float64; None where a tracer looks on."""
        if not is_plain():
            return None
        if not inputs or not inputs[0].is_floating_point() or inputs[0].ndim < 2:
            shape = f"{inputs[0].dtype} {tuple(inputs[0].shape)}" if inputs else "no tensor"
            self._warn(
                f"ConditionMonitor can't watch {name!r} ({type(layer).__name__}): its input is {shape}, not a floating "
                "tensor (N, C, ...); name the layer that gets the features."
            )
            return None
        samples = _samples(layer, widen(inputs[0].detach()))
        if samples.numel() == 0:
            return None
        try:
            P = covariance(samples)
            return Measured(spectrum(P).eigenvalues, noise_floor(samples.mean(-1), trace(P), inputs[0].dtype))
        except (NonFiniteError, SolverError):  # watching must not end a run
            return Measured(samples.new_full((samples.shape[-2],), math.nan))

    @torch.no_grad()
    def _reduce(self) -> None:
        """Turn what was measured into tensors of numbers, for many records at a time."""
        rows = numbers(self._readings, self.rtol)
        self._reduced += [(key, row) for (key, *_), row in zip(self._readings, rows, strict=True)]
        self._readings.clear()
        self._num_waiting = 0


def _watched(model: nn.Module, names: Iterable[Any]) -> tuple[dict[str, nn.Module], frozenset[str]]:
    """Return the meta-layers and the layers named, without the prefixes of wrappers, and which are the latter."""
    modules = {_plain(name): module for name, module in model.named_modules()}
    layers: dict[str, nn.Module] = {name: layer for name, layer in modules.items() if isinstance(layer, MetaLayer)}
    named = []
    for name in names:
        if not isinstance(name, str):
            example = next((plain for plain, module in modules.items() if module is name), "bn1")
            raise ArgumentError(
                f"ConditionMonitor expected dotted names, got {type(name).__name__}; pass e.g. layers=[{example!r}]."
            )
        plain = _plain(name) if _plain(name) in modules else _plain(name).removeprefix("module.")
        check_choice(plain, modules, "layer", "ConditionMonitor")
        layers[plain] = modules[plain]
        named.append(plain)
    return layers, frozenset(named)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _samples(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the input of a layer as samples ``(..., C, N)``."""
    if isinstance(layer, MetaLayer):
        return layer.samples(x)
    is_last = isinstance(layer, nn.Linear | nn.LayerNorm | nn.RMSNorm | nn.MultiheadAttention)
    return x.movedim(-1 if is_last else 1, 0).flatten(1)


def _mode(layer: nn.Module) -> Literal["train", "eval"]:
    return "train" if layer.training else "eval"


def _num_failures() -> int:
    return sum(solver_failures().values())
