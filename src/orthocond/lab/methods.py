"""The methods that runs and tables are named by: a solver with its options, and a treatment of the layer before it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from orthocond.errors import ArgumentError, check_choice
from orthocond.treatments import canonical, parse, parsed_choice, split_outside

__all__ = ["ALL", "PAPER", "Method", "method", "method_list"]

_SOLVERS = {"svd": "eigh", "newton_schulz": "newton_schulz", "products": "products", "bn": None}
_OPTIONS = {"svd": ("eps", "rtol", "clamp"), "newton_schulz": ("eps",), "products": (), "bn": ()}
"""The options of the meta-layer that a method may have of its own."""

_WAYS = {"eigh": "eigendecomposition", "newton_schulz": "Newton-Schulz iteration", "products": "certified products"}

PAPER = (
    "svd",
    "svd+sn",
    "svd+ol",
    "svd+ow",
    "svd+nog",
    "svd+olr",
    "svd+nog+ow",
    "svd+nog+ow+olr",
    "newton_schulz",
)
"""The rows of Tables 4 and 5."""

ALL = (*PAPER, "svd+nog+sn", "svd+nog+ol", "svd+nog+olr", "svd+ow+olr", "svd+gauge", "svd+nog+gauge", "bn")
"""Those of Tables 2 and 3 too, our own, and the network without a meta-layer."""


@dataclass(frozen=True)
class Method:
    """The meaning of a method's name."""

    name: str
    """The canonical spelling: ``svd+nog+ow(kind=operator)+olr``."""
    solver: str | None
    """Solver of the meta-layer; None without one."""
    treatment: str
    """For `orthocond.treat`; ``"none"`` for none."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Options of the meta-layer that override the configuration's: ``eps``, ``rtol``."""
    clamp: bool = False
    """Whether eigenvalues below ``eps`` are raised to it, instead of adding it."""

    @property
    def description(self) -> str:
        """One line for a person."""
        if self.solver is None:
            return "no meta-layer: batch norm, average pooling"
        base = f"roots by {_WAYS[self.solver]}"
        options = [f"{option} {_spelled(value)}" for option, value in self.options.items()]
        options += ["eps as a floor"] if self.clamp else []
        return ", ".join(
            [base, *options, *(part.description.partition(":")[0].lower() for part in parse(self.treatment))]
        )


def method(name: str, defaults: str = "none") -> Method:
    """Return the method of a name: ``svd``, ``newton_schulz`` or ``products`` with any treatment, or ``bn``.

    Args:
        name: the solver and the parts of the treatment, joined by ``+``, each with its options in parentheses. The
            options of the solver are the meta-layer's ``eps`` and ``rtol``, and ``clamp=true`` to take ``eps`` as a
            floor.
        defaults: a specification of the default options of parts. The method's name contains only options that differ
            from these.

    Raises:
        ArgumentError: an unknown base, a treatment or an option that does not exist, or a treatment of ``bn``.

    Example:
        >>> method("svd+olr+ow(kind=operator)+nog").name
        'svd+nog+ow(kind=operator)+olr'
        >>> method("svd(rtol=0, eps=1e-2)+nog").name
        'svd(eps=0.01, rtol=0)+nog'
        >>> method("svd(clamp=true)").description
        'roots by eigendecomposition, eps as a floor'
        >>> method("svd+ow", "ow(kind=operator)").treatment, method("svd+ow(kind=kernel)", "ow(kind=operator)").name
        ('ow(kind=operator)', 'svd+ow(kind=kernel)')
    """
    base, options, clamp, spec = _parsed(str(name).lower())
    if base not in _SOLVERS:
        check_choice(name, ALL, "method", "the run")
    items = [f"{option}={_spelled(value)}" for option, value in options.items()] + ["clamp=true"] * clamp
    solver = f"{base}({', '.join(items)})" if items else base
    try:
        spelling = canonical(spec, defaults)
        treatment = canonical(parse(spec, defaults))
    except ArgumentError as error:
        raise ArgumentError(f"the method {name!r} has no such treatment: {error}") from None
    if treatment == "none":
        return Method(solver, _SOLVERS[base], treatment, options, clamp)
    if _SOLVERS[base] is None:
        raise ArgumentError(f"the method {name!r} treats a network without a meta-layer; use bn alone, or svd+{spec}.")
    return Method(f"{solver}+{spelling}", _SOLVERS[base], treatment, options, clamp)


def _parsed(name: str) -> tuple[str, dict[str, float], bool, str]:
    """Return the base of a method, the options of its meta-layer, ``clamp``, and the specification of its treatment."""
    try:
        first, *parts = split_outside(name, "+")
        base, texts = parsed_choice(first)
    except ValueError as error:
        raise ArgumentError(f"got the method {name!r} {error}; write e.g. 'svd(eps=1e-2, rtol=0)+nog'.") from None
    known = _OPTIONS.get(base, ())
    for option in texts:
        if option not in known:
            takes = f"takes {', '.join(known)}" if known else "has no options"
            raise ArgumentError(f"the method {name!r} has no option {option!r}: {base} {takes}.")
    clamp = texts.pop("clamp", "false")
    if clamp not in ("true", "false"):
        raise ArgumentError(f"the method {name!r} takes true or false for clamp, got {clamp!r}.")
    options = {option: _number(name, option, texts[option]) for option in known if option in texts}
    return base, options, clamp == "true", "+".join(parts)


def _number(name: str, option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentError(f"the method {name!r} takes a number of at least 0 for {option}, got {text!r}.")
    return value


def _spelled(value: float) -> str:
    """Return a number as a person writes it.

    Example:
        >>> _spelled(1e-5), _spelled(0.0), _spelled(0.01)
        ('1e-5', '0', '0.01')
    """
    return repr(value).removesuffix(".0").replace("e-0", "e-").replace("e+", "e")


def method_list(names: str, *, with_gauge: bool = True, defaults: str = "none") -> list[str]:
    """Return the methods of ``paper``, ``all`` or a comma-separated list, each once.

    Args:
        names: the list.
        with_gauge: whether ``all`` has the methods with ``gauge``, which acts only on whitening without eps.
        defaults: options of parts, as in `method`.

    Example:
        >>> method_list("bn, svd+olr(steps=20, rule=exact)+nog")
        ['bn', 'svd+nog+olr(rule=exact, steps=20)']
    """
    lists = {"paper": PAPER, "all": tuple(name for name in ALL if with_gauge or "gauge" not in name)}
    try:
        pieces = [piece for piece in split_outside(names, ",") if piece]
    except ValueError as error:
        raise ArgumentError(f"got the methods {names!r} {error}; write e.g. 'svd,svd+ow(kind=operator)'.") from None
    chosen = [name for piece in pieces for name in lists.get(piece, (piece,))]
    if not chosen:
        raise ArgumentError(f"no methods in {names!r}; give paper, all, or a list like svd,svd+nog.")
    return list(dict.fromkeys(method(name, defaults).name for name in chosen))
