"""`python -m lanewise`: the command line."""

import sys

from lanewise.cli.main import main

sys.exit(main())
