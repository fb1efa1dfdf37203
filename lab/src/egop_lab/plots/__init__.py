"""Plots of experiments in one style.

An experiment describes its pictures as plain values (``picture``), which needs no matplotlib. ``figures`` draws and
saves them: a colour per method (``colors``), dashed lines for EGOP coordinates, names at line ends (``labels``).
"""
