"""What is no tensor gets one sentence, from every function and layer that takes tensors."""

import numpy as np
import pytest
import torch

from orthocond import linalg, nn, optim
from orthocond.errors import DtypeError

MATRIX, IMAGES = np.eye(4, dtype=np.float32), np.ones((2, 4, 5, 5), dtype=np.float32)
NO_FUNCTIONS_OF_TENSORS = {"Spectrum", "solver_failures"}
CALLS = {
    **{
        name: (lambda function: lambda: function(MATRIX))(getattr(linalg, name))
        for name in linalg.__all__
        if callable(getattr(linalg, name)) and name not in NO_FUNCTIONS_OF_TENSORS
    },
    "nearest_orthogonal_gradient": lambda: optim.nearest_orthogonal_gradient(MATRIX),
    "optimal_learning_rate": lambda: optim.optimal_learning_rate(MATRIX, torch.eye(4)),
    "is_orthogonal": lambda: nn.is_orthogonal(MATRIX),
    "orthogonal_loss": lambda: nn.orthogonal_loss(MATRIX),
    "DecorrelatedBatchNorm1d": lambda: nn.DecorrelatedBatchNorm1d(4)(MATRIX),
    "DecorrelatedBatchNorm2d": lambda: nn.DecorrelatedBatchNorm2d(4).eval()(IMAGES),
    "CovariancePool2d": lambda: nn.CovariancePool2d()(IMAGES),
    "WhiteningColoring2d": lambda: nn.whiten_color(torch.ones(2, 4, 5, 5), IMAGES),
}


@pytest.mark.parametrize("name", CALLS)
def test_arrays_are_named_with_the_remedy(name):
    with pytest.raises(DtypeError, match=rf"^{name} expected a tensor, got numpy.ndarray; .*torch.as_tensor\(A\)"):
        CALLS[name]()


def test_lists_too():
    with pytest.raises(DtypeError, match=r"^covariance expected a tensor, got list; "):
        linalg.covariance([[1.0, 2.0]])
