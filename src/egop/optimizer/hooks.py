"""Step an inner optimizer without torch's global step hooks, which are for the user's optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

# torch replaces the ``step`` of each optimizer class with a function that calls the hooks and has the original as its
# ``__wrapped__``. These functions share one code object. (Private to torch; tests/optimizer/test_hooks.py notices when
# this changes.)
_wrap = getattr(Optimizer, "profile_hook_step", None)
_WRAPPER = object() if _wrap is None else _wrap(lambda self: None).__code__


def step_inner(optimizer: Optimizer, *args: Any) -> Any:
    """Step an inner optimizer without running torch's global step hooks.

    The optimizer's own hooks run. If ``step`` has been replaced, on the class or on the optimizer, the replacement is
    called unchanged. If a class calls ``super().step()`` in its step, torch runs the global hooks there, as it does
    outside egop.

    Args:
        optimizer: the inner optimizer.
        *args: arguments of its ``step``.
    """
    function: Any = getattr(optimizer.step, "__func__", None)
    if getattr(function, "__code__", None) is not _WRAPPER:
        return optimizer.step(*args)
    arguments: tuple[Any, ...] = (optimizer, *args)
    keywords: dict[str, Any] = {}
    for before in optimizer._optimizer_step_pre_hooks.values():
        arguments, keywords = before(optimizer, arguments, keywords) or (arguments, keywords)
    result = function.__wrapped__(*arguments, **keywords)
    for after in optimizer._optimizer_step_post_hooks.values():
        after(optimizer, arguments, keywords)
    return result
