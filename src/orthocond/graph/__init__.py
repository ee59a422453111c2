"""Which layer feeds which: the Pre-SVD layer of a meta-layer, and the meta-layer behind a layer."""

from orthocond.graph._behind import meta_layer_behind
from orthocond.graph._join import Feed, Join
from orthocond.graph._pre_svd import channel_dim, find_pre_svd, has_matrix
from orthocond.graph._running import arguments, call, evaluating, mapped, tensors, unwrapped

__all__ = [
    "Feed",
    "Join",
    "arguments",
    "call",
    "channel_dim",
    "evaluating",
    "find_pre_svd",
    "has_matrix",
    "mapped",
    "meta_layer_behind",
    "tensors",
    "unwrapped",
]
