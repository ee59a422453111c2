"""Well-conditioned covariances and matrix roots for PyTorch networks.

``orthocond.linalg`` has the roots of a covariance with exact and always finite gradients, ``orthocond.nn`` the layers
that use them, `treat` the treatments that keep the covariance well conditioned, and `ConditionMonitor` shows it. It
implements and extends *Improving Covariance Conditioning of the SVD Meta-layer by Orthogonality*
(Song, Sebe, Wang, ECCV 2022).
"""

from orthocond import linalg, nn, optim
from orthocond.diagnosis import diagnose
from orthocond.monitor import ConditionMonitor
from orthocond.treatments import find_pre_svd, treat

__all__ = ["ConditionMonitor", "__version__", "diagnose", "find_pre_svd", "linalg", "nn", "optim", "treat"]

__version__ = "0.2.0.dev0"
