"""``python -m fs_lowrank`` is ``fs-lowrank``."""

import sys

from .cli import main

sys.exit(main())
