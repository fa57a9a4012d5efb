"""`python -m hone` is the command `hone`."""

from hone.cli import main

main()
