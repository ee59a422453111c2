"""With wide=false a matrix is decomposed in its own precision: where that suffices, where it doesn't, and who obeys."""

import pytest
import torch

from orthocond.linalg import covariance_sqrth, matrix_inv_sqrth, matrix_logh, matrix_sqrth
from orthocond.linalg._decompose import DECOMPOSITIONS
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm2d

from cases import matrices, noise
from oracle import relative_error, root, root_gradient


@pytest.fixture
def dtypes(monkeypatch):
    """The dtypes that were decomposed."""
    seen = []
    for name, decomposition in DECOMPOSITIONS.items():
        watched = lambda A, decomposition=decomposition: seen.append(A.dtype) or decomposition(A)
        monkeypatch.setitem(DECOMPOSITIONS, name, watched)
    return seen


@pytest.mark.parametrize("solver", ["eigh", "svd"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_well_conditioned_matrix_needs_no_more_than_float32(dtypes, solver, batch):
    A, G = matrices("spread 1e2", 8, batch), noise(*batch, 8, 8)
    for function, power in ((matrix_sqrth, 0.5), (matrix_inv_sqrth, -0.5)):
        leaf = A.clone().requires_grad_()
        value = function(leaf, solver=f"{solver}(wide=false)")
        value.backward(G)
        assert relative_error(value, root(A, power)) < 1e-4
        assert relative_error(leaf.grad, root_gradient(A, G, power, eps=0.0)) < 1e-3
    assert set(dtypes) == {torch.float32}


def test_small_eigenvalues_are_noise_in_float32_alone():
    A = matrices("spread 1e6", 8, (16,))
    wide, narrow = (matrix_inv_sqrth(A, solver=solver, rtol=0.0) for solver in ("eigh", "eigh(wide=false)"))
    assert relative_error(wide, root(A, -0.5)) < 1e-5
    assert relative_error(narrow, root(A, -0.5)) > 1e-4


@pytest.mark.parametrize("spectrum", ["repeated", "rank-deficient", "identity", "zero"])
def test_gradients_stay_finite_at_ties_and_rank_loss(spectrum):
    A, G = matrices(spectrum, 6, (2,)).requires_grad_(), noise(2, 6, 6)
    matrix_inv_sqrth(A, solver="eigh(wide=false)", rtol=1e-4).backward(G)
    assert A.grad.isfinite().all()


def test_float64_stays_float64(dtypes):
    A = matrices("spread 1e6", 6, (2,), torch.float64)
    assert torch.equal(matrix_sqrth(A, solver="eigh(wide=false)"), matrix_sqrth(A))
    assert set(dtypes) == {torch.float64}


def test_half_types_are_decomposed_in_float32(dtypes):
    A = matrices("spread 1e2", 4, (2,), torch.bfloat16)
    assert matrix_logh(A, solver="eigh(wide=false)").dtype == torch.bfloat16
    assert set(dtypes) == {torch.float32}


def test_layers_and_samples_obey(dtypes):
    whitening, pooling = (
        DecorrelatedBatchNorm2d(3, solver="eigh(wide=false)"),
        CovariancePool2d(solver="svd(wide=false)"),
    )
    dtypes.clear()  # constructors try their options
    whitening(noise(4, 3, 5, 5))
    pooling(noise(2, 8, 2, 2))  # fewer samples than features
    covariance_sqrth(noise(8, 3), solver="eigh(wide=false)")
    assert dtypes == [torch.float32] * 3
