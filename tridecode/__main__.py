"""`python -m tridecode`: the same program as the `tridecode` command."""

import sys

from .cli import main

sys.exit(main())
