"""Trainings as they are recorded: many runs as one tensor programme, single runs, sweeps, timed runs, and their store.

Everything that several experiments or benchmarks train with; what is claimed of the runs is in ``experiments``.
"""
