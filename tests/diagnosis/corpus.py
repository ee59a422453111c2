"""Small reproductions of what people reported: the facts of each thread, in code of our own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from orthocond import linalg

from cases import noise, rotation

GITHUB = "https://github.com"


@dataclass(frozen=True)
class Case:
    """A call that went wrong, or didn't."""

    name: str
    thread: str
    """Where it was reported."""
    verdict: str
    start: Callable[[], Tensor]
    """The leaf of the graph."""
    loss: Callable[[Tensor], Tensor]
    """What was written."""
    advice: str = ""
    """What the advice has to name."""
    repaired: Callable[[Tensor], Tensor] | None = None
    """What the advice says to write, where that repairs it."""
    consistent: bool | None = True
    symmetric: bool = False
    """Whether the leaf is a symmetric matrix."""
    raises: bool = False
    half_products: bool = False
    """Whether it multiplies in half precision, which not every CPU can."""


def weights(n: int, m: int | None = None) -> Tensor:
    return noise(n, m or n, dtype=torch.float64, seed=7)


def weighted(Q: Tensor) -> Tensor:
    return (Q * weights(*Q.shape[-2:]).to(Q.dtype)).sum()


def with_spectrum(l: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    U = rotation(len(l), seed=3)
    A = (U * torch.tensor(l, dtype=torch.float64)) @ U.mT
    return ((A + A.mT) / 2).to(dtype)


def eigh_function(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def loss(A: Tensor) -> Tensor:
        l, U = torch.linalg.eigh(A)
        return weighted((U * function(l).unsqueeze(-2)) @ U.mT)

    return loss


def zca(eps: float = 0.0) -> Callable[[Tensor], Tensor]:
    def loss(X: Tensor) -> Tensor:
        X = X - X.mean(0)
        cov = X.mT @ X / len(X) + eps * torch.eye(X.shape[1], dtype=X.dtype)
        l, U = torch.linalg.eigh(cov)
        return weighted(X @ U @ torch.diag(l.rsqrt()) @ U.mT)

    return loss


def whitened(**options: float) -> Callable[[Tensor], Tensor]:
    def loss(X: Tensor) -> Tensor:
        X = X - X.mean(0)
        cov = X.mT @ X / len(X)
        return weighted(X @ linalg.matrix_inv_sqrth(cov, **options))

    return loss


def polar(A: Tensor) -> Tensor:
    U, _, V = torch.svd(A)
    return weighted(U @ V.mT)


def occupied(A: Tensor) -> Tensor:
    _, U = torch.linalg.eigh(A)
    U = U[:, -2:]
    return weighted(U @ U.mT)


def cholesky_sample(A: Tensor) -> Tensor:
    return weighted(torch.linalg.cholesky(A) @ weights(A.shape[-1], 3).to(A.dtype))


def root_sample(A: Tensor) -> Tensor:
    return weighted(linalg.matrix_sqrth(A) @ weights(A.shape[-1], 3).to(A.dtype))


def low_rank(rows: int, columns: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (noise(rows, rank, dtype=torch.float64) @ noise(rank, columns, dtype=torch.float64, seed=2)).to(dtype)


def reconstructed(A: Tensor) -> Tensor:
    U, S, V = torch.svd(A)
    return (U @ torch.diag(S) @ V.mT).sum()


def shampoo(g: Tensor) -> Tensor:
    l, U = torch.linalg.eigh(torch.outer(g, g))
    return weighted(U @ torch.diag(l**-0.25) @ U.mT)


def sqrtm_of_samples(X: Tensor) -> Tensor:
    X = X - X.mean(0)
    cov = X.mT @ X / (len(X) - 1)
    l, U = torch.linalg.eigh(cov)
    return weighted((U * l.sqrt()) @ U.mT)


def sqrth_of_samples(X: Tensor) -> Tensor:
    X = X - X.mean(0)
    return weighted(linalg.matrix_sqrth(X.mT @ X / (len(X) - 1), rtol=1e-4))


def one_pass_covariance(X: Tensor) -> Tensor:
    mean = X.mean(0)
    cov = X.mT @ X / len(X) - torch.outer(mean, mean)
    l, U = torch.linalg.eigh(cov)
    return weighted((U * l.sqrt()) @ U.mT)


def two_pass_covariance(X: Tensor) -> Tensor:
    return weighted(linalg.matrix_sqrth(linalg.covariance(X.double(), dim=0)).to(X.dtype))


def kernel_root(X: Tensor) -> Tensor:
    K = torch.exp(-torch.cdist(X, X).square() / 2)
    l, U = torch.linalg.eigh(K)
    return weighted((U * l.clamp(min=0).sqrt()) @ U.mT)


def rank_one_eigenvectors(x: Tensor) -> Tensor:
    _, U = torch.linalg.eigh(torch.outer(x, x))
    return (U @ x * weights(len(x), 1)[:, 0].to(x.dtype)).sum()


def sum_of_eigenvectors(A: Tensor) -> Tensor:
    return torch.linalg.eigh(A).eigenvectors.sum()


def first_coordinates(A: Tensor) -> Tensor:
    U, _, _ = torch.linalg.svd(A)
    return weighted(U[:, :2])


def half_covariance(X: Tensor) -> Tensor:
    features = (X * 300).half()
    cov = (features.mT @ features).float()
    l, U = torch.linalg.eigh(cov)
    return weighted((U * l.sqrt()) @ U.mT)


def single_covariance(X: Tensor) -> Tensor:
    features = X * 300
    cov = features.mT @ features
    return weighted(linalg.matrix_sqrth(cov))


def exponentiated(X: Tensor) -> Tensor:
    P = torch.exp(100 * X)
    return torch.linalg.cholesky(P @ P.mT).sum()


def spectral_penalty(A: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(A).square().sum()


def truncated_inverse(A: Tensor) -> Tensor:
    u, d, v = torch.svd(A.mT @ A)
    return weighted(u[:, :2] @ torch.diag(1 / d[:2]) @ v[:, :2].mT)


def dead_channels() -> Tensor:
    X = noise(64, 8)
    X[:, 5:] = 0
    return X


CASES = [
    Case(
        "square root at the identity",
        f"{GITHUB}/PythonOT/POT/issues/773",
        "ties",
        lambda: torch.eye(3, dtype=torch.float64),
        eigh_function(torch.sqrt),
        "matrix_sqrth(A)",
        lambda A: weighted(linalg.matrix_sqrth(A)),
        symmetric=True,
    ),
    Case(
        "pairs of equal eigenvalues",
        f"{GITHUB}/pytorch/pytorch/issues/23133",
        "ties",
        lambda: torch.block_diag(*(torch.eye(2, dtype=torch.float64) * l for l in (4e8, 1e7, 2e6, 2e5))) / 2e5,
        eigh_function(torch.rsqrt),
        "matrix_inv_sqrth(A)",
        lambda A: weighted(linalg.matrix_inv_sqrth(A)),
        symmetric=True,
    ),
    Case(
        "logarithm at the identity",
        f"{GITHUB}/geomstats/geomstats/issues/982",
        "ties",
        lambda: torch.eye(2),
        eigh_function(torch.log),
        "matrix_logh(A)",
        lambda A: weighted(linalg.matrix_logh(A)),
        symmetric=True,
    ),
    Case(
        "projector on a degenerate pair",
        f"{GITHUB}/pytorch/pytorch/issues/47599",
        "ties",
        lambda: torch.diag(torch.tensor([0.5, 1.0, 1.0, 2.0, 2.0], dtype=torch.float64)),
        occupied,
        "spectral_projector(A, 2)",
        lambda A: weighted(linalg.spectral_projector(A, 2)),
        symmetric=True,
    ),
    Case(
        "density matrix of degenerate orbitals",
        f"{GITHUB}/XanaduAI/GradDFT/issues/35",
        "ties",
        lambda: with_spectrum([-1.0, 0.3, 0.7, 3.0, 3.0]),
        occupied,
        "spectral_projector(A, 2)",
        lambda A: weighted(linalg.spectral_projector(A, 2)),
        symmetric=True,
    ),
    Case(
        "rotation nearest to a rotation",
        f"{GITHUB}/nkolot/GraphCMR/issues/10",
        "ties",
        lambda: rotation(3),
        polar,
        "nearest_rotation(A)",
        lambda A: weighted(linalg.nearest_orthogonal(A)),
    ),
    Case(
        "Procrustes with an identity added",
        f"{GITHUB}/Pzoom522/ProcrustEs-KGE/issues/2",
        "ties",
        lambda: torch.zeros(6, 6),
        lambda A: polar(A + torch.eye(6)),
        "nearest_orthogonal(A",
        lambda A: weighted(linalg.nearest_orthogonal(A + torch.eye(6, dtype=A.dtype))),
    ),
    Case(
        "eps on the diagonal makes the null space one eigenvalue",
        f"{GITHUB}/sunshineatnoon/PytorchWCT/issues/7",
        "ties",
        lambda: noise(6, 16, dtype=torch.float32),
        zca(eps=1.0),
        "matrix_inv_sqrth(cov)",
        whitened(eps=1.0),
    ),
    Case(
        "two vanishing singular values",
        f"{GITHUB}/pytorch/pytorch/issues/49886",
        "singular",
        lambda: torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0, 0.0])),
        reconstructed,
        "spectral_projector(A @ A.mT, 3) @ A",
        lambda A: (linalg.spectral_projector(A @ A.mT, 3) @ A).sum(),
    ),
    Case(
        "polar factor of a matrix that is not of full rank",
        f"{GITHUB}/KinglittleQ/torch-batch-svd/issues/5",
        "singular",
        lambda: low_rank(6, 6, 3),
        polar,
        "nearest_orthogonal(A, rtol=1e-4)",
    ),
    Case(
        "fourth root of a rank-one preconditioner",
        f"{GITHUB}/pytorch/pytorch/issues/94772",
        "singular",
        lambda: noise(12, dtype=torch.float32),
        shampoo,
        "matrix_powerh(torch.outer(g, g), -0.25, rtol=1e-4)",
        lambda g: weighted(linalg.matrix_powerh(torch.outer(g, g), -0.25, rtol=1e-4)),
        consistent=None,
    ),
    Case(
        "whitening with more channels than samples",
        f"{GITHUB}/bhneo/decorrelated_bn/issues/1",
        "singular",
        lambda: noise(8, 16),
        zca(),
        "matrix_inv_sqrth(cov, rtol=1e-4)",
        whitened(rtol=1e-4),
        consistent=None,
    ),
    Case(
        "channels that are zero",
        f"{GITHUB}/alvarouc/ica/pull/3",
        "singular",
        dead_channels,
        lambda X: zca()(X.relu() * torch.tensor([1.0] * 5 + [0.0] * 3, dtype=X.dtype)),
        "matrix_inv_sqrth(cov, rtol=1e-4)",
        lambda X: whitened(rtol=1e-4)(X.relu() * torch.tensor([1.0] * 5 + [0.0] * 3, dtype=X.dtype)),
        consistent=None,
    ),
    Case(
        "square root of a covariance of as many samples as channels",
        f"{GITHUB}/PythonOT/POT/issues/708",
        "singular",
        lambda: noise(24, 24),
        sqrtm_of_samples,
        "matrix_sqrth(cov, rtol=1e-4)",
        sqrth_of_samples,
        consistent=None,
    ),
    Case(
        "variance that is negative by cancellation",
        f"{GITHUB}/gstoica27/ZipIt/issues/19",
        "singular",
        lambda: 300 + noise(64, 6) * torch.logspace(0, -3, 6),
        one_pass_covariance,
        "linalg.covariance(",
        two_pass_covariance,
        consistent=None,
    ),
    Case(
        "kernel matrix with a point twice",
        f"{GITHUB}/meta-pytorch/botorch/issues/567",
        "singular",
        lambda: torch.cat([noise(6, 2), noise(6, 2)]),
        kernel_root,
        "matrix_sqrth(K, rtol=1e-4)",
    ),
    Case(
        "whitening of collinear features",
        f"{GITHUB}/wandb/senpai/pull/2266",
        "ill-conditioned",
        lambda: noise(256, 4, dtype=torch.float64).mul(torch.logspace(0, -2.7, 4, dtype=torch.float64)).float(),
        zca(),
        "matrix_inv_sqrth(cov, rtol=1e-4)",
        whitened(rtol=1e-4),
    ),
    Case(
        "eigenvectors of a rank-one matrix",
        f"{GITHUB}/jax-ml/jax/issues/10527",
        "ill-posed",
        lambda: torch.tensor([1.0, 2.0, 3.0]),
        rank_one_eigenvectors,
        "spectral_projector(",
        consistent=False,
    ),
    Case(
        "sum over eigenvectors of a repeated eigenvalue",
        f"{GITHUB}/jax-ml/jax/issues/2311",
        "ill-posed",
        lambda: with_spectrum([1.0, 1.0, 2.0, 3.0]),
        sum_of_eigenvectors,
        "spectral_projector(A, k)",
        consistent=False,
        symmetric=True,
    ),
    Case(
        "loss that depends on the phase of complex eigenvectors",
        f"{GITHUB}/GaloisInc/dlkoopman/issues/1",
        "ill-posed",
        lambda: torch.eye(3, dtype=torch.complex128),
        lambda A: (torch.linalg.eigh(A)[1] * weights(3)).sum().abs().square(),
        "spectral_projector",
        consistent=False,
        symmetric=True,
    ),
    Case(
        "NaN from an earlier layer",
        f"{GITHUB}/anucvml/ddn/issues/8",
        "non-finite input",
        lambda: noise(4, 4),
        exponentiated,
        "first layer with a non-finite output",
        consistent=None,
        raises=True,
    ),
    Case(
        "covariance that overflows in float16",
        f"{GITHUB}/shengliu66/VTI/issues/8",
        "non-finite input",
        lambda: noise(64, 6),
        half_covariance,
        "orthocond.linalg.covariance(features.float())",
        single_covariance,
        consistent=None,
        raises=True,
        half_products=True,
    ),
    Case(
        "singular values of a matrix with NaN",
        f"{GITHUB}/pytorch/pytorch/issues/187759",
        "non-finite input",
        lambda: torch.tensor([[float("nan"), 0.0], [0.0, 1.0]], dtype=torch.float64),
        lambda A: torch.linalg.svdvals(A).sum(),
        "first layer with a non-finite output",
        consistent=None,
        raises=True,
    ),
    Case(
        "Cholesky factor of a singular covariance",
        f"{GITHUB}/biomedia-mira/stochastic_segmentation_networks/issues/4",
        "singular",
        lambda: torch.ones(4, 4) * torch.tensor([1.0, 1.0, 1.0, 0.0]) * torch.tensor([[1.0], [1.0], [1.0], [0.0]]),
        cholesky_sample,
        "matrix_sqrth(A)",
        consistent=None,
        symmetric=True,
        raises=True,
    ),
    Case(
        "Cholesky factor in one element of a batch",
        f"{GITHUB}/MCZhi/DIPP/issues/6",
        "singular",
        lambda: torch.stack([torch.eye(5), torch.eye(5) - 0.3]),
        lambda A: torch.linalg.cholesky(A).sum(),
        "linalg.covariance(",
        consistent=None,
        symmetric=True,
        raises=True,
    ),
    Case(
        "eigenvalues alone at the identity",
        f"{GITHUB}/HIPS/autograd/pull/527",
        "healthy",
        lambda: torch.eye(4),
        spectral_penalty,
        symmetric=True,
    ),
    Case(
        "inverse of the largest eigenvalues of a low-rank matrix",
        f"{GITHUB}/pytorch/pytorch/issues/110009",
        "healthy",
        lambda: noise(5, 10, dtype=torch.float64),
        truncated_inverse,
    ),
    Case(
        "pseudo-inverse of a rank-one matrix",
        f"{GITHUB}/pytorch/pytorch/issues/65911",
        "healthy",
        lambda: noise(30, 2, dtype=torch.float64),
        lambda x: weighted(torch.linalg.pinv(torch.outer(x[:, 0], x[:, 1]))),
    ),
    Case(
        "sign of an eigenvector",  # anybody's choice, but locally constant: no derivative tells
        f"{GITHUB}/tensorly/tensorly/issues/74",
        "healthy",
        lambda: with_spectrum([1.0, 2.0, 3.0, 4.0]),
        sum_of_eigenvectors,
        symmetric=True,
    ),
    Case(
        "whitening of a spread spectrum",
        f"{GITHUB}/kornia/kornia/pull/458",
        "healthy",
        lambda: noise(256, 6) * torch.logspace(0, -1, 6),
        zca(),
    ),
    Case(
        "whitening by functions that are exact at ties",
        f"{GITHUB}/PythonOT/POT/issues/773",
        "healthy",
        lambda: torch.eye(5),
        lambda A: weighted(linalg.matrix_inv_sqrth(A)),
        symmetric=True,
    ),
]
