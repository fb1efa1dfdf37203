"""The paper's experiments, one file each: settings, which runs to do, what is claimed of them, and pictures.

``base.py`` says what an experiment is, ``registry.py`` which there are, ``reproduce.py`` runs them.
"""
