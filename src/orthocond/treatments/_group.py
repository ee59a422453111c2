"""The treatments of several layers of one model, as one object."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from orthocond.errors import ArgumentError
from orthocond.treatments._host import Treatment
from orthocond.treatments._step import LastStep

__all__ = ["TreatmentGroup"]


class TreatmentGroup:
    """The treatments of all Pre-SVD layers of a model, as ``treat(model, "all", spec, example_input=x)`` makes them.

    They are attached, detached, removed, saved and loaded together.

    Example:
        >>> import orthocond
        >>> from torch import nn
        >>> model = nn.Sequential(
        ...     nn.Conv2d(3, 8, 1), orthocond.nn.DecorrelatedBatchNorm2d(8),
        ...     nn.Conv2d(8, 4, 1), orthocond.nn.DecorrelatedBatchNorm2d(4),
        ... )
        >>> treatment = orthocond.treat(model, "all", "nog", example_input=torch.randn(2, 3, 5, 5))
        >>> treatment
        TreatmentGroup(layers=['0', '2'], spec='nog')
        >>> treatment.attach(torch.optim.SGD(model.parameters(), lr=0.1)).last
        {'0': None, '2': None}
    """

    def __init__(self, treatments: Iterable[Treatment]) -> None:
        self.treatments = {treatment.name: treatment for treatment in treatments}
        """The treatments by the dotted names of their layers."""

    def __repr__(self) -> str:
        return f"TreatmentGroup(layers={list(self.treatments)}, spec={self.spec!r})"

    def _repr_html_(self) -> str:
        return "".join(treatment._repr_html_() for treatment in self.treatments.values())

    @property
    def spec(self) -> str:
        """The specification in its canonical spelling, the same for each layer."""
        return next(iter(self.treatments.values())).spec

    @property
    def last(self) -> dict[str, LastStep | None]:
        """What the last step did to each layer."""
        return {name: treatment.last for name, treatment in self.treatments.items()}

    def attach(self, optimizer: Any, *, scheduler: Any = None, penalty: bool = False) -> "TreatmentGroup":
        """Let all of them act on the steps of an optimizer, or none: see `Treatment.attach`."""
        attached: list[Treatment] = []
        try:
            for treatment in self.treatments.values():
                attached.append(treatment.attach(optimizer, scheduler=scheduler, penalty=penalty))
        except ArgumentError:
            for treatment in attached:
                treatment.detach()
            raise
        return self

    def detach(self) -> None:
        """Stop acting on the optimizer's steps; weights and groups stay as they are."""
        for treatment in self.treatments.values():
            treatment.detach()

    def remove(self) -> None:
        """Detach, and replace parametrized weights by plain ones: see `Treatment.remove`."""
        for treatment in self.treatments.values():
            treatment.remove()

    def penalty(self) -> Tensor:
        """Return the term to add to the loss, summed over the layers."""
        return torch.stack([treatment.penalty() for treatment in self.treatments.values()]).sum()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, by layer."""
        return {name: treatment.state_dict() for name, treatment in self.treatments.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            ArgumentError: it belongs to other layers or another treatment.
        """
        if not isinstance(state, Mapping) or not state or isinstance(state.get("layer"), str):
            raise ArgumentError(
                "load_state_dict expected the state that state_dict() of a TreatmentGroup returned, by layer; pass the "
                "entry of the checkpoint in which it was saved."
            )
        if state.keys() != self.treatments.keys():
            raise ArgumentError(
                f"the state is that of the layers {', '.join(state)}, not of {', '.join(self.treatments)}; "
                "treat the model as it was when the checkpoint was written."
            )
        for name, treatment in self.treatments.items():
            treatment.load_state_dict(state[name])
