"""One table of cases: the spectra and batch shapes that every solver and layer has to get right."""

import torch
from torch import Tensor

SPECTRA = {
    "spread 1e2": lambda n: torch.logspace(0, -2, n, dtype=torch.float64),
    "spread 1e6": lambda n: torch.logspace(0, -6, n, dtype=torch.float64),
    "spread 1e12": lambda n: torch.logspace(0, -12, n, dtype=torch.float64),
    "clustered": lambda n: 1 + 1e-7 * torch.arange(n, dtype=torch.float64),
    "repeated": lambda n: torch.tensor([1.0, 0.25, 0.01], dtype=torch.float64).repeat(n)[:n].sort().values,
    "rank-deficient": lambda n: torch.logspace(0, -2, n, dtype=torch.float64) * (torch.arange(n) < (27 * n) // 64),
    "identity": lambda n: torch.ones(n, dtype=torch.float64),
    "zero": lambda n: torch.zeros(n, dtype=torch.float64),
}
BATCHES = [(), (1,), (2, 3), (64,)]


def rotation(n: int, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Random orthogonal matrices, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*batch, n, n, generator=generator, dtype=torch.float64)).Q


def matrices(spectrum: str, n: int, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Symmetric matrices with a spectrum of the table, randomly turned; the identity and zero are exactly that."""
    l = SPECTRA[spectrum](n)
    if spectrum in ("identity", "zero"):
        return torch.diag(l).expand(*batch, n, n).to(dtype).clone()
    U = rotation(n, batch)
    A = (U * l) @ U.mT
    return ((A + A.mT) / 2).to(dtype)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def hostile(count: int, d: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Matrices of large, tiny, equal and zero entries, of low rank, near reflections and near ties."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, -1e-7, 1e37, -1e37, 1e-40], dtype=torch.float64)
    U, V = (torch.linalg.qr(normal(count, d, d)).Q for _ in range(2))
    values = torch.ones(count, d, dtype=torch.float64)
    values[:, -1] = -1 + 10.0 ** -torch.randint(1, 17, (count,), generator=generator)
    kinds = [
        special[torch.randint(len(special), (count, d, d), generator=generator)],
        normal(count, d, 1) @ normal(count, 1, d),
        (U * values.unsqueeze(-2)) @ V.mT,
        U + 1e-9 * normal(count, d, d),
        normal(count, d, d) * 10.0 ** torch.randint(-30, 30, (count, 1, 1), generator=generator),
    ]
    which = torch.arange(count) % len(kinds)
    return torch.stack(kinds)[which, torch.arange(count)].to(dtype)
