"""Makes the tables and the hostile verifiers in this folder importable, in worker processes too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
