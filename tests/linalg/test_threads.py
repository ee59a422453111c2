"""Batches divided among threads: the same results, and nothing else changed."""

import os
import threading

import pytest
import torch

from orthocond.linalg import _threads, matrix_sqrth
from orthocond.linalg._threads import eigh

from cases import noise

pytestmark = pytest.mark.skipif(_threads._set_threads_here() is None, reason="PyTorch has no MKL here")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def symmetric(*shape, dtype=torch.float64):
    A = noise(*shape, shape[-1], dtype=dtype)
    return A + A.mT


@pytest.mark.parametrize(
    "shape", [(512, 32), (3, 171, 32), (30_000, 8), (15, 100), (7, 130), (1, 64), (32,), (0, 5), (4, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_vectors_are_those_of_torch(shape, dtype):
    A = symmetric(*shape, dtype=dtype)
    eigenvalues, U = eigh(A)
    expected = torch.linalg.eigvalsh(A)
    tolerance = 50 * torch.finfo(dtype).eps * max(shape[-1], 1)
    assert eigenvalues.shape == expected.shape
    assert U.shape == A.shape
    assert torch.allclose(eigenvalues, expected, atol=tolerance)
    assert torch.allclose((U * eigenvalues.unsqueeze(-2)) @ U.mT, A, atol=10 * tolerance)


def test_the_caller_s_own_setting_stays():
    set_threads = _threads._set_threads_here()
    before = set_threads(7)
    try:
        eigh(symmetric(512, 32))
        assert set_threads(7) == 7
    finally:
        set_threads(before)
    assert torch.get_num_threads() == 2
    seen = []
    for _ in range(2):  # in a thread of the caller's, before and after
        thread = threading.Thread(target=lambda: seen.append(set_threads(0)))
        thread.start()
        thread.join()
        eigh(symmetric(512, 32))
    assert seen[0] == seen[1]


def test_an_error_in_another_thread_reaches_the_caller(monkeypatch):
    real = torch.linalg.eigh

    def failing(A):
        if threading.current_thread() is not threading.main_thread():
            raise torch.linalg.LinAlgError("on purpose")
        return real(A)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    with pytest.raises(torch.linalg.LinAlgError, match="on purpose"):
        eigh(symmetric(512, 32))
    A = symmetric(512, 32) @ symmetric(512, 32)
    root = matrix_sqrth(A @ A.mT)  # each matrix alone, in this thread
    assert torch.allclose(root @ root, A @ A.mT, rtol=1e-6, atol=1e-6 * float((A @ A.mT).abs().max()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_makes_threads_of_its_own():
    """As a data loader's workers do."""
    A = symmetric(512, 32)
    eigh(A)
    assert _threads._pool is not None
    child = os.fork()
    if child == 0:
        ok = _threads._pool is None
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert _threads._pool is not None


def test_what_watches_this_thread_still_sees_the_operation():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen = (*self.seen, str(func))
            return func(*args, **(kwargs or {}))

    with Watching() as watching:
        eigh(symmetric(512, 32))
    assert any("eigh" in name for name in watching.seen)
    with torch.inference_mode():
        assert eigh(symmetric(512, 32))[0].shape == (512, 32)
