"""Alternatives from PyPI and from newer versions of torch: they compete where they are installed."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

__all__ = [
    "PACKAGES",
    "inverse_roots",
    "orthogonal_parametrizations",
    "polar_factors",
    "rotations",
    "shifted",
    "spectral_functions",
    "state",
]

PACKAGES = {
    "torchspd": "torchspd",
    "spd_learn": "spd_learn.functional",
    "pyriemann": "pyriemann.geometry.base",
    "POT": "ot.backend",
    "geotorch": "geotorch",
    "roma": "roma",
}
"""The module of each package that is imported, by the package's name."""


def state() -> dict[str, str]:
    """Return for each package its version, or why it does not compete."""
    return {package: _version(package) if _module(package) else _why_not(package) for package in PACKAGES}


def inverse_roots() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions from symmetric matrices to their inverse roots, by the name of the package.

    The root of torch itself, from 2.15 on, is inverted.
    """
    own = {"torch.linalg.matrix_sqrth, inverted": _inverted} if hasattr(torch.linalg, "matrix_sqrth") else {}
    return own | _installed(
        {
            "torchspd": lambda package: package.invsqrtm,
            "spd_learn": lambda package: package.matrix_inv_sqrt.apply,
        }
    )


def spectral_functions(name: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions from symmetric matrices to one of `orthocond.linalg.FUNCTIONS` of them, by the package's name.

    Where a package has no such function it is left out. The formula that POT's torch backend and most code use,
    autograd through ``torch.linalg.eigh``, is among them.
    """
    short, _, exponent = name.removesuffix(")").partition("(exponent=")
    p = float(exponent or {"sqrt": 0.5, "inv_sqrt": -0.5}.get(short, 0.0))
    spd_learn = {"sqrt": "matrix_sqrt", "inv_sqrt": "matrix_inv_sqrt", "log": "matrix_log", "exp": "matrix_exp"}
    common = {"sqrt": "sqrtm", "inv_sqrt": "invsqrtm", "log": "logm", "exp": "expm"}  # of torchspd and pyriemann

    def by_common_name(package: Any) -> Callable[[Tensor], Tensor]:
        return getattr(package, common[short]) if short in common else lambda A: package.powm(A, p)

    def of_spd_learn(package: Any) -> Callable[[Tensor], Tensor]:
        if short in spd_learn:
            return getattr(package, spd_learn[short]).apply  # type: ignore[no-any-return]
        return lambda A: package.matrix_power.apply(A, torch.tensor(p, dtype=A.dtype))

    makers = {"torchspd": by_common_name, "spd_learn": of_spd_learn, "pyriemann": by_common_name}
    if short == "sqrt":
        makers["POT"] = lambda package: package.TorchBackend().sqrtm
    return _installed(makers)


def _inverted(A: Tensor) -> Tensor:
    root: Tensor = torch.linalg.matrix_sqrth(A)  # type: ignore[attr-defined]  # of torch 2.15
    inverse: Tensor = torch.linalg.inv(root)
    return inverse


def polar_factors() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions from matrices to their polar factors, by name: torch's own, from 2.15 on."""
    return {"torch.linalg.polar": _torch_polar} if hasattr(torch.linalg, "polar") else {}


def _torch_polar(A: Tensor) -> Tensor:
    if A.shape[-2] < A.shape[-1]:  # it takes tall matrices alone
        return _torch_polar(A.mT).mT
    factor: Tensor = torch.linalg.polar(A)[0]  # type: ignore[attr-defined]  # of torch 2.15
    return factor


def rotations() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions from square matrices to their nearest rotations, by the name of the package."""
    return _installed({"roma": lambda package: package.special_procrustes})


def orthogonal_parametrizations() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Return functions that make the weight of a linear layer orthogonal, including those of torch."""
    own = {f"torch, {kind}": _torch_orthogonal(kind) for kind in ("matrix_exp", "cayley", "householder")}
    return own | _installed({"geotorch": lambda package: _whole(package.orthogonal)})


def _torch_orthogonal(kind: str) -> Callable[[nn.Module], nn.Module]:
    return lambda layer: parametrizations.orthogonal(layer, orthogonal_map=kind)


def _whole(make: Callable[[nn.Module, str], None]) -> Callable[[nn.Module], nn.Module]:
    def made(layer: nn.Module) -> nn.Module:
        make(layer, "weight")
        return layer

    return made


def _installed(peers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {package: get(module) for package, get in peers.items() if (module := _module(package)) is not None}


def _module(package: str) -> Any | None:
    return None if _why_not(package) else importlib.import_module(PACKAGES[package])


def _why_not(package: str) -> str:
    """Return why a package can't be imported; nothing if it can."""
    whole = PACKAGES[package].partition(".")[0]
    if importlib.util.find_spec(whole) is None:
        return "not installed"
    try:
        importlib.import_module(whole)  # first: of one that fails, parts may be there the second time
        importlib.import_module(PACKAGES[package])
    except Exception as error:  # another package may raise anything; the others continue
        return f"can't be imported: {error}"
    return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def shifted(root: Callable[[Tensor], Tensor], eps: float) -> Callable[[Tensor], Tensor]:
    """Return the root of ``A + eps I``, for functions without an eps."""

    def shifted_root(A: Tensor) -> Tensor:
        return root(A + eps * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))

    return shifted_root
