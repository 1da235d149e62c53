"""`python -m jaxtrain.train`: trains a recipe. train_command.py has the command.

Nothing imports this module: as a submodule of that name it would take the place of the function
`jaxtrain.train` (api.py).
"""

import sys

from jaxtrain import BEGAN, train_command
from jaxtrain.run import streams

if __name__ == "jaxtrain.train":
    raise ImportError("jaxtrain.train is a command: use `from jaxtrain import train`")
if __name__ == "__main__":
    sys.exit(streams.run(lambda argv: train_command.main(argv, BEGAN), sys.argv[1:]))
