"""`python -m gateway.ops.cli`: how the local cluster starts its own processes, whatever is on PATH."""

from gateway.ops.cli import main

main()
