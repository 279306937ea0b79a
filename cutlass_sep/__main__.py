"""`python -m cutlass_sep` is `cutlass-sep`."""

import sys

from .cli import main

sys.exit(main())
