"""Trains every shrunk recipe and writes its losses for the jax that is installed:

    python tests/golden/write.py [RECIPE …]

For a change that is meant to move them: the file's difference shows by how much, and the commit
says why.
"""

import json
import os
import pathlib
import sys
import tempfile

sys.path[:0] = [str(pathlib.Path(__file__).parents[1])]

import conftest  # noqa: E402, F401 (8 devices, before jax starts)
import jax  # noqa: E402
from support import golden  # noqa: E402


def main(recipes: list[str]) -> None:
    file = golden.values_file(jax.__version__)
    values = json.loads(file.read_text()) if file.exists() else {}
    for recipe in recipes or golden.RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["JAXTRAIN_CACHE"] = os.path.join(folder, "cache")
            values[recipe] = golden.run(recipe, pathlib.Path(folder, "run"))
        file.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
