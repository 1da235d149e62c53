"""`python -m jaxtrain.generate`: text from a checkpoint. generate_command.py has the command.

Nothing imports this module: as a submodule of that name it would take the place of the function
`jaxtrain.generate` (api.py).
"""

import sys

from jaxtrain.generate_command import main
from jaxtrain.run import streams

if __name__ == "jaxtrain.generate":
    raise ImportError("jaxtrain.generate is a command: use `from jaxtrain import generate`")
if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
