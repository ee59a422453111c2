"""What the demonstration runs: whitening that knows its rank, the usual whitening, and batch norm, on real digits.

The stem has more channels than its patches have pixels, so its covariance is singular, as in the first layer of most
networks. ``docs/guides/laboratory.md`` describes how the setting was found.
"""

from orthocond.lab.config import Config, changed
from orthocond.lab.presets import preset

__all__ = ["METHODS", "SEEDS", "config"]

METHODS = ("bn", "svd", "svd(eps=1e-5, rtol=0)")
"""Batch norm; whitening of the support; whitening of everything with batch norm's eps, which inverts the null space."""

SEEDS = 12
"""Runs of each method, from seed 0 on."""


def config() -> Config:
    """Return the configuration of its runs.

    Example:
        >>> config().width
        32
    """
    return changed(preset("dbn-digits"), {"model": "resnet-small", "width": 32, "epochs": 2})
