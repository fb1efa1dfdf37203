"""The names that parameters have in the model as its author wrote it."""

# What DistributedDataParallel puts before every name.
WRAPPER = "module."
# What torch.compile puts into names.
_COMPILED = "_orig_mod."


def plain_name(name: str) -> str:
    """The name without what ``torch.compile`` adds; the user never wrote that."""
    return name.replace(_COMPILED, "")
