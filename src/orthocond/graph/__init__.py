"""Which layer feeds which: the Pre-SVD layer of a meta-layer, and the meta-layer behind a layer."""

from orthocond.graph._behind import channel_dim, meta_layer_behind
from orthocond.graph._pre_svd import call, evaluating, find_pre_svd, has_matrix, tensors, unwrapped

__all__ = [
    "call",
    "channel_dim",
    "evaluating",
    "find_pre_svd",
    "has_matrix",
    "meta_layer_behind",
    "tensors",
    "unwrapped",
]
