"""The reproduction as a page: every figure beside its claims, numbers and verdicts, all read from the records.

``egop-lab report`` calls it; it wrote ``docs/reproduction.md`` and the pages in ``docs/reproduction``.
"""
