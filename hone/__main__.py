"""The command `hone`, also as `python -m hone`. Ctrl-C is handled before anything slow is imported."""

import sys

from hone.base import terminal


def main() -> None:
    terminal.stop_at_once_on_ctrl_c_in_imports()
    from hone.cli.app import main

    main()


if __name__ == "__main__":
    sys.argv[0] = f"{sys.executable} -m hone"  # as it is shown to the user, who can repeat it
    main()
