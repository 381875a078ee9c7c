"""Trains, exports and measures the embedded models; see `scripts/training/__main__.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.training.__main__ import main  # noqa: E402

if __name__ == "__main__":
    main()
