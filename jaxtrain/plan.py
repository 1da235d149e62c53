"""`python -m jaxtrain.plan`: the planner's command (planner/command/main.py)."""

import sys

from jaxtrain.planner.command.main import main
from jaxtrain.run import streams

if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
