"""The ratios that `orthocond.linalg` promises, measured side by side.

Run it with ``python -m orthocond.lab.bench.ratios``. Each line is a ratio of best times within this run.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from orthocond import linalg
from orthocond.lab.bench.measure import alternate

__all__ = ["main"]


def main() -> None:
    """Measure and print."""
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; best of alternated repeats")
    _root_ratios()
    _polar_ratios()


def _root_ratios() -> None:
    X = torch.randn(128, 64, 96)
    A = linalg.covariance(X)
    wide = A.double()
    G = torch.randn_like(A)

    def root_by_svd(A: Tensor) -> Tensor:
        U, s, _ = torch.linalg.svd(A)
        root: Tensor = (U * s.sqrt().unsqueeze(-2)) @ U.mT
        return root

    seconds = alternate(
        {
            "root": _forward_backward(linalg.matrix_sqrth, A, G),
            "inverse root": _forward_backward(linalg.matrix_inv_sqrth, A, G),
            "autograd through svd": _forward_backward(root_by_svd, A, G),
            "eigh forward, float64": lambda: torch.linalg.eigh(wide),
        },
        repeats=40,
    )
    best = {name: min(times) for name, times in seconds.items()}
    print("\nroots of 128x64x64 float32, forward+backward")
    for name in ("root", "inverse root"):
        faster = best["autograd through svd"] / best[name]
        over = best[name] / best["eigh forward, float64"]
        print(f"  {name:13} {1e3 * best[name]:6.1f} ms, {faster:.2f} times as fast as autograd through svd (float32),")
        print(f"  {'':13} {over:.2f} times the time of eigh forward alone (float64)")


def _polar_ratios() -> None:
    A = torch.randn(256, 2304)
    seconds = alternate(
        {solver: _call(linalg.nearest_orthogonal, A, solver) for solver in linalg.POLAR_SOLVERS}
        | {"torch.linalg.svd": lambda: torch.linalg.svd(A, full_matrices=False)},
        repeats=7,
    )
    best = {name: min(times) for name, times in seconds.items()}
    print("\nnearest_orthogonal of 256x2304 float32")
    for name, value in best.items():
        by_svd, by_torch = best["svd"] / value, best["torch.linalg.svd"] / value
        print(f"  {name:16} {1e3 * value:6.1f} ms, {by_svd:.2f} times as fast as solver='svd',")
        print(f"  {'':16} {by_torch:.2f} times as fast as torch.linalg.svd in float32")


def _forward_backward(root: Callable[[Tensor], Tensor], A: Tensor, G: Tensor) -> Callable[[], object]:
    A = A.clone().requires_grad_()
    return lambda: torch.autograd.grad(root(A), A, G)


def _call(function: Callable[..., Tensor], A: Tensor, solver: str) -> Callable[[], object]:
    return lambda: function(A, solver=solver)


if __name__ == "__main__":
    main()
