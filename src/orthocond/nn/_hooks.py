"""Where a module has its hooks."""

__all__ = ["CALLED", "FORWARD", "FORWARD_HOOKS"]

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
FORWARD = (
    *FORWARD_HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Two dicts with hooks, three with their options."""
CALLED = (
    *FORWARD,
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""All that are called with the module, so that another module can have them."""
