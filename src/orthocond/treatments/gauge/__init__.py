"""Re-gauging: another weight in front of a whitening layer, with the same outputs and a well conditioned covariance.

With the covariance ``S`` of the layer's input, ``P = W S W^T`` is what the whitening decomposes, and its output,
``P^(-1/2) W (z - mean)``, depends on the weight only through the polar factor of ``W S^(1/2)``. So ``c P^(-1/2) W``
does the same as ``W``, and has the covariance ``c^2 I``. Its gradient is another one, and so is what a step of it does:
`orthocond.treatments.gauge._metric`. All of it is in docs/gauge.md.
"""

from orthocond.treatments.gauge._part import METRICS, Gauge

__all__ = ["METRICS", "Gauge"]
