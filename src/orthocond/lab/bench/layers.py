"""What decorrelated batch norm costs against BatchNorm and against the usual way of writing it, side by side.

Run it with ``python -m orthocond.lab.bench.layers``: forward and backward in float32, the best of alternated repeats,
and the bytes that are kept for the backward pass.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from orthocond.lab.bench.measure import alternate
from orthocond.nn import DecorrelatedBatchNorm2d, fold

__all__ = ["main"]

LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def main() -> None:
    """Measure and print."""
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; best of alternated repeats, forward+backward")
    for shape in ((64, 64, 32, 32), (128, 64, 32, 32)):
        _training(shape)
    _folded()


def _training(shape: tuple[int, ...]) -> None:
    x, g = torch.randn(shape), torch.randn(shape)
    layers: dict[str, nn.Module] = {
        "BatchNorm2d": nn.BatchNorm2d(shape[1]),
        "DecorrelatedBatchNorm2d": DecorrelatedBatchNorm2d(shape[1]),
        "the usual way": UsualWhitening(shape[1]),
    }
    contestants = {
        f"{name}, {layout}": _forward_backward(layer, x.clone(memory_format=kind), g.clone(memory_format=kind))
        for name, layer in layers.items()
        for layout, kind in LAYOUTS.items()
        if (name, layout) != ("the usual way", "channels last")
    }
    best = {name: min(times) for name, times in alternate(contestants, repeats=11).items()}
    saved = {name: saved_bytes(layer, x) for name, layer in layers.items()}
    own = best["DecorrelatedBatchNorm2d, contiguous"]
    print(f"\n{shape}")
    for name, value in best.items():
        kept = saved[name.partition(",")[0]] / saved["BatchNorm2d"]
        print(f"  {name:38} {1e3 * value:7.1f} ms  {value / own:5.2f} of ours  {kept:5.2f} of BatchNorm's saved bytes")
    print(f"  ours over BatchNorm2d, contiguous: {own / best['BatchNorm2d, contiguous']:.2f}")


def _folded() -> None:
    conv = nn.Conv2d(64, 64, 3, padding=1).eval()
    folded = fold(nn.Sequential(conv, DecorrelatedBatchNorm2d(64)))
    x = torch.randn(32, 64, 32, 32)
    with torch.no_grad():
        seconds = alternate({"convolution": lambda: conv(x), "folded": lambda: folded(x)}, repeats=21)
    best = {name: min(times) for name, times in seconds.items()}
    print(f"\nfolded into a convolution: {best['folded'] / best['convolution']:.3f} times the convolution alone")


class UsualWhitening(nn.Module):
    """Whitening as it is usually written: transpose, centre, and autograd through ``eigh``."""

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` ``(N, C, H, W)`` whitened."""
        n, c, h, w = x.shape
        X = x.transpose(0, 1).contiguous().view(c, -1)
        centred = X - X.mean(1, keepdim=True)
        P = torch.mm(centred, centred.T) / X.shape[1] + self.eps * torch.eye(c, dtype=x.dtype, device=x.device)
        eigenvalues, U = torch.linalg.eigh(P)
        y = torch.mm(U @ torch.diag(eigenvalues.rsqrt()) @ U.T, centred).view(c, n, h, w).transpose(0, 1)
        return y * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Return the bytes of the tensors that a forward pass keeps for the backward pass, each counted once."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x.clone().requires_grad_())
    return sum(seen.values())


def _forward_backward(layer: nn.Module, x: Tensor, g: Tensor) -> Callable[[], object]:
    x = x.requires_grad_()
    inputs: Iterable[Tensor] = (x, *layer.parameters())
    wanted = tuple(inputs)
    return lambda: torch.autograd.grad(layer(x), wanted, g)


if __name__ == "__main__":
    main()
