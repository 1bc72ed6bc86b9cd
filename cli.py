#!/usr/bin/env python3
"""Run from a checkout without installing: the same program as the `tridecode` command."""

import sys

from tridecode.commands import main

if __name__ == "__main__":
    sys.exit(main())
