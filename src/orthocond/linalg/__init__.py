"""Functions of tensors: spectral functions of a covariance, nearest orthogonal matrices, distances, spectra.

The same promises hold for all of them: options are keyword-only and have the same names everywhere, batch
dimensions are arbitrary, dtype and device are kept, the input is never changed, and each matrix of a batch is
independent of its neighbours, forward and backward.
"""

from orthocond.linalg._counts import solver_failures, solver_fallbacks
from orthocond.linalg._covariance import covariance
from orthocond.linalg._distances import bures_distance, frechet_distance, gaussian_frechet_distance
from orthocond.linalg._functions import FUNCTIONS
from orthocond.linalg._gradients import GRADIENTS
from orthocond.linalg._polar import POLAR_SOLVERS, nearest_orthogonal
from orthocond.linalg._powers import matrix_exph, matrix_functionh, matrix_logh, matrix_powerh
from orthocond.linalg._projector import spectral_projector, top_eigenvector
from orthocond.linalg._roots import SOLVERS, matrix_inv_sqrth, matrix_sqrth, matrix_sqrth_pair
from orthocond.linalg._rotation import Alignment, nearest_rotation, procrustes
from orthocond.linalg._smaller_side import covariance_sqrth
from orthocond.linalg._spectrum import Spectrum, spectrum

__all__ = [
    "FUNCTIONS",
    "GRADIENTS",
    "POLAR_SOLVERS",
    "SOLVERS",
    "Alignment",
    "Spectrum",
    "bures_distance",
    "covariance",
    "covariance_sqrth",
    "frechet_distance",
    "gaussian_frechet_distance",
    "matrix_exph",
    "matrix_functionh",
    "matrix_inv_sqrth",
    "matrix_logh",
    "matrix_powerh",
    "matrix_sqrth",
    "matrix_sqrth_pair",
    "nearest_orthogonal",
    "nearest_rotation",
    "procrustes",
    "solver_failures",
    "solver_fallbacks",
    "spectral_projector",
    "spectrum",
    "top_eigenvector",
]
