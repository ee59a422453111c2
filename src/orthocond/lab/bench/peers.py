"""What others offer on PyPI: competes where it is installed, and is never needed."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

__all__ = ["inverse_roots", "orthogonal_parametrizations"]


def inverse_roots() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions from symmetric matrices to their inverse roots, by the name of the package."""
    return _installed(
        {
            "torchspd": lambda package: package.invsqrtm,
            "spd_learn.functional": lambda package: package.matrix_inv_sqrt.apply,
        }
    )


def orthogonal_parametrizations() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Return what makes the weight of a linear layer orthogonal, torch's own among them."""
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
    found = {}
    for name, get in peers.items():
        package = name.partition(".")[0]
        if importlib.util.find_spec(package) is not None:
            found[package] = get(importlib.import_module(name))
    return found


def shifted(root: Callable[[Tensor], Tensor], eps: float) -> Callable[[Tensor], Tensor]:
    """Return the root of ``A + eps I``, for those that take no eps."""

    def shifted_root(A: Tensor) -> Tensor:
        return root(A + eps * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))

    return shifted_root
