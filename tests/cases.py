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
