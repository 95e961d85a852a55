"""`python -m gateway.cli`: how the local cluster starts its own processes, whatever is on PATH."""

from gateway.cli import main

main()
