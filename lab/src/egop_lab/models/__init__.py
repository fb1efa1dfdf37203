"""Networks that are trained and measured: perceptrons, residual networks, transformers, and many perceptrons as one.

Plain torch, with their initialisations and losses; nothing here knows of an optimizer.
"""
