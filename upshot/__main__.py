"""`python -m upshot`, which is what `torchrun -m upshot train RECIPE` starts."""

import sys

from upshot.cli import main

sys.exit(main())
