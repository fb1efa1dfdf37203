"""Trainings as they are recorded: batched runs, single runs, sweeps, timed runs, and the store of their records.

Everything that several experiments or benchmarks train with; what is claimed of the runs is in ``experiments``.
"""
