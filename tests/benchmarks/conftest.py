"""The scripts of benchmarks/ import each other by their bare names."""

import sys

from support import ROOT

if str(ROOT / "benchmarks") not in sys.path:
    sys.path.append(str(ROOT / "benchmarks"))
