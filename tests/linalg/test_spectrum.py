"""Eigenvalues, rank, the three condition numbers and the gap."""

import math

import numpy as np
import pytest
import torch

from orthocond.errors import ArgumentError
from orthocond.linalg import spectrum

from cases import matrices


def test_full_rank_matches_numpy():
    A = matrices("spread 1e2", 8, (3,), torch.float64)
    found = spectrum(A, eps=0.5)
    assert np.allclose(found.eigenvalues, np.linalg.eigvalsh(A)[..., ::-1])
    assert np.allclose(found.cond, np.linalg.cond(A))
    assert torch.equal(found.cond, found.cond_support)
    assert np.allclose(found.cond_eps, np.linalg.cond(A + 0.5 * torch.eye(8)))
    assert found.rank.tolist() == [8, 8, 8]


def test_rank_deficient():
    found = spectrum(matrices("rank-deficient", 64), eps=1e-3)
    assert found.rank == 27
    assert found.cond > 1e6
    assert 6 < found.cond_support < 8
    assert found.cond_eps.item() == pytest.approx(1001, rel=1e-3)


def test_zero_matrix():
    found = spectrum(torch.zeros(2, 3, 3))
    assert found.rank.tolist() == [0, 0]
    assert found.cond.tolist() == [math.inf] * 2
    assert found.cond_support.tolist() == [1, 1]
    assert spectrum(torch.zeros(3, 3), eps=1.0).cond_eps == 1


def test_gap_is_the_smallest_distance_over_the_largest_eigenvalue():
    assert spectrum(torch.diag(torch.tensor([8.0, -2.0, 1.0, 3.0]))).gap == 0.25
    assert spectrum(torch.diag(torch.tensor([1.0, -8.0, 3.0]))).gap == 0.25
    assert spectrum(torch.stack([torch.eye(3), torch.zeros(3, 3)])).gap.tolist() == [0, 0]
    assert spectrum(torch.ones(2, 1, 1)).gap.tolist() == [math.inf] * 2
    repeated = spectrum(matrices("repeated", 8, dtype=torch.float64))
    assert repeated.gap < 1e-14  # the identity and this one have the naive gradient's worst case, whatever their cond
    assert repeated.cond < 101


def test_rtol_moves_the_rank():
    A = torch.diag(torch.tensor([1.0, 0.125, 0.01]))
    assert spectrum(A, rtol=0.1).rank == 2
    assert spectrum(A, rtol=0.125).rank == 1


def test_it_is_detached_and_in_float32_at_least():
    A = matrices("spread 1e2", 4, (2,), torch.bfloat16).requires_grad_()
    found = spectrum(A)
    assert not found.cond.requires_grad
    assert found.cond.dtype == found.eigenvalues.dtype == torch.float32
    assert spectrum(torch.diag(torch.tensor([1.0, 1e-5])).half()).cond.isfinite()


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (0, 0)], ids=str)
def test_empty(shape):
    assert spectrum(torch.ones(shape)).rank.shape == spectrum(torch.ones(shape)).gap.shape == shape[:-2]


def test_bad_input():
    with pytest.raises(ArgumentError, match="spectrum expected square"):
        spectrum(torch.ones(2, 3))
    with pytest.raises(ArgumentError, match="rtol=-1"):
        spectrum(torch.eye(2), rtol=-1)
