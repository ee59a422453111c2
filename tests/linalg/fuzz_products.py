"""Fuzzing of the solver ``products``: right inside its bounds, and outside them decomposed or right.

    python tests/linalg/fuzz_products.py --matrices 10000 --seed 0

Float32 covariances of every size up to 64x64, rank and scale. Half of the run has eigenvalues inside the bounds, ties
and edges included: nothing may be decomposed. The other half has eigenvalues in the gap, at its edges, or below zero:
the result must be that of a decomposition that drops what is at most ``dropped`` times the largest. The oracle is that
of `fuzz.py`, up to 12x12 in extended precision, above in float64. Root, inverse root and the gradient of both are
compared: relative errors of 1e-5 and 1e-4 are allowed.
"""

import argparse
import sys
import warnings
from collections import Counter

import numpy as np
import torch
from fuzz import Case, jacobi, truth

from orthocond.errors import OrthocondWarning
from orthocond.linalg import matrix_sqrth_pair, solver_fallbacks

KEPT, DROPPED = 0.0625, 2e-4
VALUE, GRADIENT = 1e-5, 1e-4
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 33, 48, 64)
OUTSIDE = ("gap", "kept edge", "dropped edge", "negative", "spread", "several")
_UNCLEAR = 2e-3
"""How near to the cut-off, relative to it, an eigenvalue is within the rounding of float32."""


def inside(count: int, n: int, generator: np.random.Generator) -> np.ndarray:
    """Return eigenvalues inside the bounds, of every rank from 1 on, spread or tied.

    The certificate bounds all dropped ones together, so that each may be as large as ``dropped / n^(1/8)``.
    """
    random = generator.random((count, n))
    edges = generator.choice([0.0, 1.0], (count, n))
    random = np.where(generator.random((count, 1)) < 0.2, edges, random)
    kept = np.arange(n) < generator.integers(1, n + 1, (count, 1))
    l = np.where(kept, KEPT**random, 0.999 * DROPPED * random / n**0.125)
    l[:, 0] = 1.0
    return l


def outside(count: int, n: int, kind: str, generator: np.random.Generator) -> np.ndarray:
    """Return eigenvalues of which at least one is outside the bounds; it takes two."""
    l = inside(count, n, generator)
    random = generator.random((count, n))
    in_gap = DROPPED * (KEPT / n**0.125 / DROPPED) ** random
    if kind == "spread":
        return np.concatenate([np.ones((count, 1)), 10 ** (-8 * random[:, 1:])], 1)
    if kind == "several":
        return np.where((np.arange(n) > 0) & (generator.random((count, n)) < 0.5), in_gap, l)
    l[:, -1] = {
        "gap": in_gap[:, -1],
        "kept edge": KEPT * (0.5 + random[:, -1]),
        "dropped edge": DROPPED * (0.9 + 0.6 * random[:, -1]),
        "negative": -(10 ** (-3 + 3 * random[:, -1])),
    }[kind]
    return l


def covariances(l: np.ndarray, generator: np.random.Generator) -> torch.Tensor:
    """Return float32 covariances with about these eigenvalues, of any scale."""
    Q = np.linalg.qr(generator.standard_normal((*l.shape, l.shape[-1])))[0]
    A = (Q * l[:, None]) @ Q.swapaxes(1, 2) * 10.0 ** generator.uniform(-10, 10, (len(l), 1, 1))
    A = torch.from_numpy(A).float()
    return torch.triu(A) + torch.triu(A, 1).mT


def errors(A: torch.Tensor, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the relative errors of the pair and of the gradient ``(b,)``, and where the cut-off is clear."""
    n, size = A.shape[-1], torch.linalg.matrix_norm(A, keepdim=True)
    G, H = (torch.from_numpy(generator.standard_normal(A.shape)).float() for _ in range(2))
    G, H = G / size.sqrt(), H * size.sqrt()  # so that both parts of the gradient count
    A.requires_grad_()
    pair = matrix_sqrth_pair(A, solver="products")
    (slope,) = torch.autograd.grad(pair, A, [G, H])
    values, gradient = [], 0.0
    wide = A.detach().double().numpy()
    for name, root, direction in zip(("sqrt", "inv_sqrt"), pair, (G, H), strict=True):
        asked = Case(n, torch.float32, "", name, "products", 0.0, DROPPED)
        extended, decompose = (np.longdouble, jacobi) if n <= 12 else (np.float64, np.linalg.eigh)
        matrices = wide.astype(extended)
        true = truth(matrices, direction.double().numpy().astype(extended), asked, extended(0), DROPPED, decompose)
        values.append(_relative(root.detach().numpy(), true.value))
        gradient = gradient + true.gradient
    l = np.linalg.eigvalsh(wide)
    is_clear = (np.abs(l / (DROPPED * l[:, -1:]) - 1) > _UNCLEAR).all(1)
    return np.maximum(*values), _relative(slope.numpy(), gradient), is_clear


def _relative(result: np.ndarray, true: np.ndarray) -> np.ndarray:
    norm = np.sqrt((true.astype(np.longdouble) ** 2).sum((1, 2)))
    return (np.sqrt(((result - true) ** 2).sum((1, 2))) / np.where(norm > 0, norm, 1)).astype(float)


def fuzz(count: int, seed: int, *, kinds: tuple[str, ...], batch: int = 50) -> dict[str, float]:
    """Return how many matrices of some kinds, ``"inside"`` among them, were tried, and what came out."""
    generator = np.random.default_rng(seed)
    found: Counter = Counter(matrices=0, wrong=0, decomposed=0, unclear=0)
    worst = {"value": 0.0, "gradient": 0.0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a matrix with a negative eigenvalue", OrthocondWarning)
        while found["matrices"] < count:
            kind, n = str(generator.choice(kinds)), int(generator.choice(SIZES))
            number = min(batch, count - found["matrices"])
            n = n if kind == "inside" else max(n, 2)
            l = inside(number, n, generator) if kind == "inside" else outside(number, n, kind, generator)
            solver_fallbacks(reset=True)
            A = covariances(l, generator)
            value, gradient, is_clear = errors(A, generator)
            fits = (value < VALUE) & (gradient < GRADIENT)  # NaN fits nothing
            wrong = ~fits & (is_clear | ~np.isfinite(value + gradient))
            found.update(
                matrices=number,
                wrong=int(wrong.sum()),
                decomposed=solver_fallbacks()["products"],
                unclear=int((~is_clear).sum()),
            )
            for name, each in (("value", value), ("gradient", gradient)):
                worst[name] = max(worst[name], each[is_clear].max(initial=0.0))
            if wrong.any():
                first = int(np.flatnonzero(wrong)[0])
                print(f"wrong: {kind}, {n}x{n}, {value[first]:.1e}, {gradient[first]:.1e}\n{l[first]}", file=sys.stderr)
    return {**found, **worst}


def main() -> int:
    """Fuzz as long as the command line says, inside the bounds and outside."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", type=int, default=10_000, help="how many matrices to try, inside and outside")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random matrices")
    options = parser.parse_args()
    is_wrong = False
    for name, kinds in {"inside": ("inside",), **{kind: (kind,) for kind in OUTSIDE}}.items():
        count = options.matrices if name == "inside" else -(-options.matrices // len(OUTSIDE))
        found = fuzz(count, options.seed, kinds=kinds)
        is_wrong |= bool(found["wrong"] or (name == "inside" and found["decomposed"]))
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" if key in ("value", "gradient") else f"{key} {value}"
                                      for key, value in found.items()), flush=True)  # fmt: skip
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
