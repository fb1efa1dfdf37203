"""What networks are trained on: digits (which ship with the lab), Fashion-MNIST, images, text, random matrices.

Missing data raise :class:`~egop_lab.data.missing.MissingDataError`, whose message says what to do.
"""
