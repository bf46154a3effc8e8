"""Makes the small networks of these tests importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `method_networks`
