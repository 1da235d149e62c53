"""`python -m jaxtrain.plan`: the planner, in the folder planner/command.

Nothing imports this module: as a submodule of that name it would take the place of the function
`jaxtrain.plan` (api.py).
"""

import sys

from jaxtrain.planner.command.main import main
from jaxtrain.run import streams

if __name__ == "jaxtrain.plan":
    raise ImportError("jaxtrain.plan is a command: use `from jaxtrain import plan`")
if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
