"""Lets these tests import checkpoint_state.py from beside them, as the processes that they start do."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
