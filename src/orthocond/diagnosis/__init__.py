"""Diagnosis of the gradients of eigendecompositions and singular value decompositions, in any model."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from orthocond._core.private import num_compiled_frames
from orthocond.diagnosis._calls import Call
from orthocond.diagnosis._findings import VERDICTS, Finding, finding
from orthocond.diagnosis._record import Record
from orthocond.diagnosis._report import as_html, as_text
from orthocond.diagnosis._watch import Watch

__all__ = ["VERDICTS", "Diagnosis", "Finding", "diagnose"]

_COMPILED = (
    "Calls inside a region compiled by torch.compile can't be seen. Run the same lines once without the compiler: put "
    'them under torch.compiler.set_stance("force_eager").'
)


def diagnose(model: nn.Module | None = None) -> "Diagnosis":
    r"""Return a context manager that watches every decomposition and the gradients that pass through it.

    Put it around a forward and a backward pass of any model. It records the calls of `torch.linalg.eigh`,
    ``eigvalsh``, ``svd``, ``svdvals``, ``pinv``, ``cholesky``, ``torch.svd`` and of the roots and layers of this
    library, and reports for each its input, its gradient, and what to write instead. Outputs, gradients and the random
    state are unchanged bit for bit, and no hooks remain.

    The gradient through eigenvectors :math:`U` contains the terms :math:`a_{ij} / (\lambda_j - \lambda_i)`, where
    :math:`a` is the antisymmetric part of :math:`U^T \bar U` and :math:`\bar U` is the incoming gradient. If two
    eigenvalues are equal and :math:`a_{ij} = 0`, the loss is a function of the matrix and only the formula fails: a
    function with its own gradient repairs that. If :math:`a_{ij} \neq 0`, the loss depends on which eigenvectors the
    solver happens to return, and is itself ill posed.

    Args:
        model: the model whose modules' dotted names appear in the findings, and whose calls are watched in every
            thread. Without a model, modules are named by their classes, and only the thread that enters is watched.

    Returns:
        A `Diagnosis`: ``print`` it, or read ``findings``.

    Example:
        >>> A = torch.eye(3, requires_grad=True)
        >>> with diagnose() as diagnosis:
        ...     l, U = torch.linalg.eigh(A)
        ...     (U @ torch.diag(l.rsqrt()) @ U.mT)[0, 1].backward()
        >>> diagnosis.findings[0].verdict
        'ties'
        >>> print(diagnosis.findings[0].advice)
        Replace the decomposition, and the lines that use its result, by one function whose gradient is exact here:
            orthocond.linalg.matrix_inv_sqrth(A)
    """
    return Diagnosis(model)


class Diagnosis:
    """What `diagnose` saw: one `Finding` for each call, oldest first.

    ``print(diagnosis)`` shows the places in the code, worst first; a notebook shows a table. Entering the same object
    again adds to it.

    Example:
        >>> from orthocond import diagnose
        >>> with diagnose() as diagnosis:
        ...     _ = torch.linalg.svdvals(torch.diag(torch.tensor([2.0, 1.0])))
        >>> found = diagnosis.to_dicts()[0]
        >>> found["function"], found["verdict"], found["cond"]
        ('torch.linalg.svdvals', 'healthy', 2.0)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._record = Record()
        self._watches: list[Watch] = []
        self._interrupted = False
        self._compiled_before = 0
        self.after_backward: Callable[[Tensor, bool], None] | None = None

    @property
    def findings(self) -> list[Finding]:
        """One finding for each call, oldest first."""
        self._record.settle()
        return [finding(call, interrupted=self._interrupted) for call in _without_recomputed(self._record.calls)]

    @property
    def notes(self) -> list[str]:
        """What could not be seen, in sentences."""
        self._record.settle()
        return list(self._record.notes)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the findings as plain dicts."""
        return [found.to_dict() for found in self.findings]

    def __str__(self) -> str:
        return as_text(self.findings, self.notes)

    def _repr_html_(self) -> str:
        return as_html(self.findings, self.notes)

    def __enter__(self) -> Self:
        model = self._model
        names = {} if model is None else {id(layer): name for name, layer in model.named_modules() if name}
        watch = Watch(names, self._record, self.after_backward)
        if model is not None and any(_is_compiled(layer) for layer in model.modules()):
            self._record.note(_COMPILED)
        elif model is not None:
            watch.follow(model)
        self._compiled_before = num_compiled_frames()
        watch.__enter__()
        self._watches.append(watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch = self._watches.pop()
        watch.__exit__(kind, error, trace)
        watch.remove()
        self._interrupted |= kind is not None and issubclass(kind, Exception)
        if num_compiled_frames() > self._compiled_before:
            self._record.note(_COMPILED)


def _is_compiled(layer: nn.Module) -> bool:
    return hasattr(layer, "_orig_mod") or getattr(layer, "_compiled_call_impl", None) is not None


def _without_recomputed(calls: list[Call]) -> list[Call]:
    """Return the calls; of those that a checkpoint repeats in the backward pass, the one that has the gradient."""
    kept: list[Call] = []
    for call in calls:
        twin = next((other for other in kept if call.during_backward and _are_twins(call, other)), None)
        if twin is None:
            kept.append(call)
        elif call.gradients and not twin.gradients:
            kept[kept.index(twin)] = call
    return kept


def _are_twins(call: Call, other: Call) -> bool:
    same = (call.function, call.place, call.shape) == (other.function, other.place, other.shape)
    if not same or other.during_backward or call.values is None or other.values is None:
        return same and not other.during_backward and call.values is other.values
    return torch.equal(call.values, other.values)
