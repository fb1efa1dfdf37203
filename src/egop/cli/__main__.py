"""``python -m egop.cli``."""

from egop.cli import main

main()
