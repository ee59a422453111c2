"""The methods that runs and tables are named by: a solver, and a treatment of the layer in front of it."""

from dataclasses import dataclass

from orthocond.errors import ArgumentError, check_choice
from orthocond.treatments import TREATMENTS, canonical_order

__all__ = ["ALL", "DEMO", "PAPER", "Method", "method", "method_list"]

_SOLVERS = {"svd": "eigh", "newton_schulz": "newton_schulz", "bn": None}
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


DEMO = ("bn", "newton_schulz", "svd", "svd+nog", "svd+ow", "svd+nog+ow+olr", "svd+gauge")
"""Those that the demonstration shows."""


@dataclass(frozen=True)
class Method:
    """What a method's name stands for."""

    name: str
    """In the order of the paper's tables: ``svd+nog+ow+olr``."""
    solver: str | None
    """Of the meta-layer; None where there is none."""
    treatment: str
    """For `orthocond.treat`; ``"none"`` for none."""

    @property
    def description(self) -> str:
        """One line for a person."""
        if self.solver is None:
            return "no meta-layer: batch norm, average pooling"
        parts = self.treatment.split("+") if self.treatment != "none" else []
        base = "roots by eigendecomposition" if self.solver == "eigh" else "roots by Newton-Schulz iteration"
        return ", ".join([base, *(TREATMENTS[part].description.partition(":")[0].lower() for part in parts)])


def method(name: str) -> Method:
    """Return the method of a name: ``svd`` or ``newton_schulz`` with any treatment, or ``bn``.

    Raises:
        ArgumentError: another base than those, a treatment that does not exist, or one on ``bn``.

    Example:
        >>> method("svd+olr+ow+nog").name
        'svd+nog+ow+olr'
    """
    base, *parts = [part.strip().lower() for part in str(name).split("+")]
    if base not in _SOLVERS:
        check_choice(name, ALL, "method", "the run")
    for part in parts:
        if part not in TREATMENTS:
            known = [f"{base}+{other}" for other in TREATMENTS]
            check_choice(f"{base}+{part}", known, "method", "the run")
    if parts and _SOLVERS[base] is None:
        raise ArgumentError(
            f"the method {name!r} treats a network without a meta-layer; use bn alone, or svd+{'+'.join(parts)}."
        )
    chosen = sorted(set(parts), key=canonical_order)
    return Method("+".join([base, *chosen]), _SOLVERS[base], "+".join(chosen) or "none")


def method_list(names: str, *, with_gauge: bool = True) -> list[str]:
    """Return the methods of ``paper``, ``all`` or a comma-separated list, each once.

    Args:
        names: the list.
        with_gauge: whether ``all`` has the methods with ``gauge``, which acts on whitening without eps alone.

    Example:
        >>> method_list("bn, svd+ow+nog")
        ['bn', 'svd+nog+ow']
    """
    lists = {"paper": PAPER, "all": tuple(name for name in ALL if with_gauge or "gauge" not in name)}
    chosen = [name for part in names.split(",") if part.strip() for name in lists.get(part.strip(), (part.strip(),))]
    if not chosen:
        raise ArgumentError(f"no methods in {names!r}; give paper, all, or a list like svd,svd+nog.")
    return list(dict.fromkeys(method(name).name for name in chosen))
