"""Well-conditioned covariances and matrix roots for PyTorch networks.

``orthocond.linalg`` has the roots of a covariance with exact and always finite gradients. The package
implements and extends *Improving Covariance Conditioning of the SVD Meta-layer by Orthogonality*
(Song, Sebe, Wang, ECCV 2022).
"""

from orthocond import linalg, nn

__all__ = ["__version__", "linalg", "nn"]

__version__ = "0.1.0"
