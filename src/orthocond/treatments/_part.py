"""One treatment: its name, its options, and what it does."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from orthocond._core.options import Kind, check_kind, spelled
from orthocond.errors import ArgumentError, check_choice

if TYPE_CHECKING:
    from orthocond.treatments._step import Step
    from orthocond.treatments._target import Target

__all__ = ["NOTE_KINDS", "Note", "Part", "overrides", "renewed", "unknown_option"]

NOTE_KINDS = ("number", "flag", "range")
"""What a note can be: a number, true or false, or a pair of the smallest and the largest.

Example:
    >>> NOTE_KINDS
    ('number', 'flag', 'range')
"""


@dataclass(frozen=True)
class Note:
    """Declares a number that a part records in each step.

    The declarations define the attributes of `Treatment.last`, the laboratory's metrics and the report's columns.

    Example:
        >>> Note("eta", "optimal learning rate").default is None
        True
    """

    name: str
    description: str
    kind: str = "number"
    """One of `NOTE_KINDS`."""
    is_costly: bool = False
    """Whether reading it needs a computation, so that it should not be read at every step."""

    def __post_init__(self) -> None:
        check_choice(self.kind, NOTE_KINDS, "kind", "Note")

    @property
    def default(self) -> bool | None:
        """The value in a step that didn't note it: False for a flag, None otherwise."""
        return False if self.kind == "flag" else None


class Part:
    """One treatment. A subclass has a name, options, and the methods that it needs.

    The options are the keyword arguments of ``__init__``, each with a type and a default; a specification can set
    strings, booleans and numbers (``"ow(kind=operator)"``). Every method has a default that does nothing.

    Example:
        >>> class Scaled(Part):
        ...     name, description, acts_on = "scaled", "Scaled gradient: the gradient times a factor.", "gradient"
        ...
        ...     def __init__(self, *, factor: float = 0.5) -> None:
        ...         self.factor = factor
        ...
        ...     def act(self, step):
        ...         step.gradient = self.factor * step.gradient
        >>> Scaled(factor=0.1)
        scaled(factor=0.1)
        >>> Scaled.options["factor"]
        0.5
    """

    name: ClassVar[str]
    """The name in specifications: lower case."""
    description: ClassVar[str] = ""
    """One sentence."""
    reference: ClassVar[str] = ""
    """Where it is defined."""
    acts_on: ClassVar[str] = ""
    """``"weight"``, ``"gradient"``, ``"learning rate"`` or ``"loss"``."""
    order: ClassVar[int] = 50
    """Parts with a lower order act first, and enclose those with a higher one."""
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names of parts that it can't be combined with, each with the reason."""
    notes: ClassVar[tuple[Note, ...]] = ()
    """What it notes in a step."""
    replaces_weight: ClassVar[bool] = False
    """Whether `install` replaces the layer's weight, so that the optimizer must be created afterwards."""
    options: Mapping[str, Any] = MappingProxyType({})
    """The options that text can give: of the class their defaults, of an instance their values."""
    _given: Mapping[str, Any]
    _is_installed = False
    _kinds: ClassVar[Mapping[str, Kind]] = MappingProxyType({})
    _arguments: ClassVar[tuple[str, ...]] = ()
    _by_place: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isgeneratorfunction(cls.act):
            cls.act = contextmanager(cls.act)  # type: ignore[method-assign]
        _, *arguments = _signature(cls.__init__).parameters.values()
        parameters = [parameter for parameter in arguments if parameter.kind is parameter.KEYWORD_ONLY]
        cls._by_place = tuple(p.name for p in arguments if p.kind is p.POSITIONAL_OR_KEYWORD)
        kinds = {parameter.name: Kind.of(parameter.annotation) for parameter in parameters}
        cls._arguments = tuple(kinds)
        cls._kinds = MappingProxyType({name: kind for name, kind in kinds.items() if kind is not None})
        cls.options = MappingProxyType({p.name: p.default for p in parameters if p.name in cls._kinds})

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the options, and keep them for specifications and checkpoints."""
        if args or options.keys() & cls._by_place:
            raise ArgumentError(
                f"the options of the part {cls.__name__} have to be keyword-only; write def __init__(self, *, ...), "
                "and pass them by name."
            )
        part = super().__new__(cls)
        for name, value in options.items():
            if name not in cls._arguments:
                raise unknown_option(cls, name)
            if name in cls._kinds:
                check_kind(value, cls._kinds[name], name, cls.name)
        part._given = options
        part.options = {**cls.options, **{name: value for name, value in options.items() if name in cls._kinds}}
        return part

    def __init__(self) -> None:
        pass

    def __repr__(self) -> str:
        """Return the specification: the name, and the options that differ from their defaults."""
        return self.spelled(type(self).options)

    def spelled(self, defaults: Mapping[str, Any]) -> str:
        """Return the specification where other options are the defaults.

        Example:
            >>> from orthocond.treatments import OrthogonalWeight
            >>> OrthogonalWeight(kind="kernel").spelled(OrthogonalWeight(kind="operator").options)
            'ow(kind=kernel)'
        """
        items = (f"{name}={spelled(value)}" for name, value in self.options.items() if value != defaults[name])
        options = ", ".join(items)
        return f"{self.name}({options})" if options else self.name

    def install(self, target: "Target") -> None:
        """Prepare a layer, once, when it is treated: check it, or change its weight."""

    def watch(self, target: "Target") -> None:
        """Register callbacks for forward passes, with ``target.after_forward``, when it is attached."""

    def penalty(self, target: "Target") -> Tensor | None:  # noqa: ARG002  # for a subclass
        """Return the term to add to the loss; None for nothing."""
        return None

    def act(self, step: "Step") -> AbstractContextManager[object] | None:  # noqa: ARG002  # for a subclass
        """Act on a step before the optimizer takes it.

        A function acts before the parts with a higher order; a generator (or a context manager) acts before them until
        its ``yield``, and after them from there on.
        """
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, in plain types and tensors; None for nothing."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a saved state."""


def unknown_option(part: type[Part], option: str) -> ArgumentError:
    """Return the error for an option that a part doesn't have."""
    known = ", ".join(f"{name}={spelled(default)}" for name, default in part.options.items())
    return ArgumentError(
        f"{part.name} got an unknown option {option!r}; its options are: {known or 'none, it has no options'}."
    )


def renewed(part: Part) -> Part:
    """Return another part with the same options, for another layer."""
    return type(part)(**part._given)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # an annotation that is text, and names what can't be found
        return inspect.signature(function)


def overrides(part: Part, method: str) -> bool:
    """Return whether a part overrides a method."""
    own: Callable[..., Any] = getattr(type(part), method)
    return own is not getattr(Part, method)
