"""`python -m jaxtrain.plan`: the planner's command (planner/command/main.py)."""

import gc
import sys

from jaxtrain.planner.command.main import main
from jaxtrain.run import streams

if __name__ == "__main__":
    # a search makes and drops so many objects that a fifth of its time was looking for cycles
    gc.set_threshold(200_000, 50, 50)
    sys.exit(streams.run(main, sys.argv[1:]))
