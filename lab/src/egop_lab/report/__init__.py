"""The reproduction as a page: every figure beside its claims, numbers and verdicts, all read from the records.

``egop-lab report`` calls it; ``docs/reproduction.md`` is made by it.
"""
