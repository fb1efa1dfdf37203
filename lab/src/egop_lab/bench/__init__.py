"""Measure what a basis costs and what a step costs the host: ``egop-lab bench``.

Each part of the benchmark is one file, ``bases`` and ``host``; ``run`` lists them, prints their tables and keeps their
rows in a JSON file. Steps on a GPU are timed in the race (``egop_lab.race.timing``).
"""
