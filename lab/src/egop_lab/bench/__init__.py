"""What a basis and a step cost, measured beside other optimizers in one run: ``egop-lab bench``."""
