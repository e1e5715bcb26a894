"""`python -m mainspring`: the command, where its script is not on the PATH."""

from mainspring.cli import main

main()
