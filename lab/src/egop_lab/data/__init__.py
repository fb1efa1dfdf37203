"""What networks are trained on: digits (which ship with the lab), Fashion-MNIST, images, text, random matrices.

What is not there is a :class:`~egop_lab.data.missing.MissingDataError` that says what to do.
"""
