"""The command ``fs-lowrank``, also as ``python -m fs_lowrank``."""

import sys

from .spin import bound_spin


def main() -> int:
    """Run the command line; returns its exit code."""
    bound_spin()
    try:
        from .cli import main as command  # takes a moment, in which Ctrl-C is no error either

        return command()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
