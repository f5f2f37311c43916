"""`python -m sdflow` is the `sdflow` command."""

from sdflow.cli import main

main()
