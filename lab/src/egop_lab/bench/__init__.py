"""What a basis and a step cost, measured beside other optimizers in one run: ``egop-lab bench``.

One file a part of the benchmark; ``run.py`` has their list, ``targets.py`` what the numbers are meant to be.
"""
