"""`python -m upshot.cli`."""

import sys

from upshot.cli import main

sys.exit(main())
