#!/usr/bin/env python3
"""Run from a checkout without installing: the same program as the `tridecode` command."""

import sys

try:
    from tridecode.cli import main
except KeyboardInterrupt:
    sys.exit(130)
except ModuleNotFoundError as error:
    sys.exit(f"tridecode: error: the package {error.name} is missing here; run the README's command, or activate .venv")

if __name__ == "__main__":
    sys.exit(main())
