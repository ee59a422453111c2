"""One step of the optimizer, as the parts of a treatment see it, and the record of it afterwards."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from orthocond._core.precision import narrow
from orthocond.treatments._part import Note
from orthocond.treatments._registry import TREATMENTS
from orthocond.treatments._target import Target

__all__ = ["RATE", "LastStep", "Step"]

RATE = Note("learning_rate", "learning rate that the step was taken with")
"""What the host notes of every step."""

ParameterGroup = dict[str, Any]


class Step:
    """A step that the optimizer is about to take.

    Parts read and set `gradient` and `rate`; the values that they record are in `Treatment.last` afterwards.

    Example:
        >>> import orthocond
        >>> class Halved(orthocond.treatments.Part):
        ...     name, acts_on = "halved", "gradient"
        ...
        ...     def act(self, step):
        ...         step.gradient = step.gradient / 2
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
        >>> treatment = orthocond.treat(model, "0", [Halved()])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = treatment.attach(optimizer)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> model[0].weight.grad
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """

    def __init__(self, target: Target, optimizer: torch.optim.Optimizer, group: ParameterGroup) -> None:
        self.target, self.optimizer = target, optimizer
        self.has_inner_parts = False
        """Whether other parts act inside of the one that is acting."""
        parameter = target.parameter
        assert parameter.grad is not None
        self._grad = parameter.grad
        # A fused optimizer under GradScaler unscales within its step: what it is given has to be scaled.
        self._scale = getattr(optimizer, "grad_scale", None)
        self._group = group
        self.own_rate: float | None = None
        """The rate that a part has set."""
        self._weight: Tensor | Callable[[], Tensor] | None = None
        self.noted: dict[str, Any] = {}

    @property
    def gradient(self) -> Tensor:
        """The gradient as a matrix: one row per output channel, groups as a batch, unscaled. Setting it changes it.

        The result may be a view of the gradient: clone it to keep it beyond the next change.
        """
        matrix = self.target.layout.matrix(self._grad)
        return matrix if self._scale is None else matrix / self._scale

    @gradient.setter
    def gradient(self, matrix: Tensor) -> None:
        if self._scale is not None:
            matrix = matrix * self._scale
        self._grad.copy_(narrow(self.target.layout.kernel(matrix, self._grad), self._grad))

    @property
    def weight(self) -> Tensor:
        """The weight that the layer uses, as a matrix like the gradient.

        Setting it changes what the inner parts see, not the layer; a function is called only when one of them reads
        it.
        """
        if self._weight is None:
            self._weight = self.target.weight
        elif not isinstance(self._weight, Tensor):
            self._weight = self._weight()
        return self._weight

    @weight.setter
    def weight(self, matrix: Tensor | Callable[[], Tensor]) -> None:
        self._weight = matrix

    @property
    def parameter(self) -> Tensor:
        """The trained tensor as a matrix like the gradient: the weight, or what is behind its parametrization."""
        return self.target.layout.matrix(self.target.parameter.detach())

    @property
    def is_plain_sgd(self) -> bool:
        """Whether the optimizer subtracts ``rate * (momentum * buffer + gradient + weight_decay * parameter)``."""
        settings = ("nesterov", "dampening", "maximize")
        return isinstance(self.optimizer, torch.optim.SGD) and not any(self._group[name] for name in settings)

    @property
    def is_ascent(self) -> bool:
        """Whether the optimizer adds the gradient instead of subtracting it."""
        return bool(self._group.get("maximize", False))

    @property
    def weight_decay(self) -> float:
        """The weight decay of SGD."""
        return float(self._group["weight_decay"])

    @property
    def momentum(self) -> float:
        """The momentum of SGD."""
        return float(self._group["momentum"])

    @property
    def momentum_buffer(self) -> Tensor | None:
        """What SGD keeps of the steps before, as a matrix like the gradient; None before the first and without any."""
        buffer = self.optimizer.state.get(self.target.parameter, {}).get("momentum_buffer")
        return None if buffer is None or self.momentum == 0 else self.target.layout.matrix(buffer)

    @property
    def rate(self) -> float:
        """The learning rate of this step. Setting it affects this step only."""
        return float(self._group["lr"]) if self.own_rate is None else self.own_rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self.own_rate = rate

    def note(self, **values: Any) -> None:
        """Record values: numbers, flags, pairs or tensors, or functions that compute them when they are read."""
        self.noted.update(values)


class LastStep(Mapping[str, Any]):
    """What a treatment did in the last step: a mapping, whose values are attributes as well.

    Nothing is computed before it is read.

    Example:
        >>> import orthocond
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
        >>> treatment = orthocond.treat(model, "0", "nog")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = treatment.attach(optimizer)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> optimizer.step()
        >>> treatment.last.learning_rate, round(treatment.last.gradient_range[1], 3)
        (0.1, 7.071)
        >>> list(treatment.last)
        ['learning_rate', 'gradient_range']
    """

    def __init__(self, notes: Mapping[str, Note], values: Mapping[str, Any]) -> None:
        self._notes = notes
        self._values = {name: values.get(name, note.default) for name, note in notes.items()}

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if callable(value):
            value = value()
        if isinstance(value, Tensor):
            value = bool(value) if self._notes[name].kind == "flag" else value.tolist()
        if isinstance(value, list):
            value = tuple(value)
        self._values[name] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._notes)

    def __len__(self) -> int:
        return len(self._notes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._notes:
            return self[name]
        return _default(name, tuple(self._notes))

    def __repr__(self) -> str:
        return f"LastStep({', '.join(f'{name}={value!r}' for name, value in self.items())})"


def _default(name: str, known: tuple[str, ...]) -> bool | None:
    """Return the value of a note that another registered part would have made."""
    for part in TREATMENTS.values():
        for note in part.notes:
            if note.name == name:
                return note.default
    raise AttributeError(f"a step of this treatment notes {', '.join(known)}; there is no {name!r}")
