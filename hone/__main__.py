"""`python -m hone` is the command `hone`."""

import sys

from hone.cli.app import main

sys.argv[0] = f"{sys.executable} -m hone"  # as it is said to the user, who can repeat it
main()
