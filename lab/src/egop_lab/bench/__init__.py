"""Measure what a basis and a step cost, compared with other optimizers in one run: ``egop-lab bench``.

Each part of the benchmark is one file: ``bases``, ``steps`` and ``host``; ``run.py`` lists them.
"""
