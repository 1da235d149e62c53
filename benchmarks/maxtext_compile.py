"""MaxText's train step, compiled ahead of time by its own `train_compile`, in its own Python.

    PYTHON benchmarks/maxtext_compile.py MAXTEXT FOLDER name=value …

peer_ahead.py starts it. It writes program.txt (XLA's text of the compiled step), and figures.json
with memory, cost and versions, into FOLDER. The settings are MaxText's. It needs nothing of
jaxtrain, which MaxText's Python may lack.
"""

import importlib
import importlib.metadata
import json
import pathlib
import sys
import time

MEMORY = ("argument", "temp", "output", "alias", "host_argument", "host_temp")
COST = ("flops", "bytes accessed")


def main(maxtext: str, folder: str, *settings: str) -> None:
    """Compiles the step and writes its files. Raises what MaxText and XLA raise."""
    sys.path.insert(0, str(pathlib.Path(maxtext, "src")))
    command = importlib.import_module("maxtext.trainers.pre_train.train_compile")
    compile_step, out = command.jit_and_compile, pathlib.Path(folder)

    def written(*arguments, **named):
        """What MaxText's own function returns: the compiled step, whose files are written."""
        begin = time.time()
        compiled = compile_step(*arguments, **named)
        analysis, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
        figures = {
            "compiling": round(time.time() - begin, 1),
            "memory": {name: getattr(analysis, f"{name}_size_in_bytes") for name in MEMORY},
            "cost": {name: cost[name] for name in COST if name in cost},
        }
        packages = ("jax", "libtpu")
        versions = {name: importlib.metadata.version(name) for name in packages}
        out.joinpath("program.txt").write_text(compiled.as_text())
        out.joinpath("figures.json").write_text(json.dumps(figures | {"versions": versions}))
        return compiled

    command.jit_and_compile = written
    base = pathlib.Path(maxtext, "src", "maxtext", "configs", "base.yml")
    command.main(["train_compile.py", str(base), *settings])


if __name__ == "__main__":
    main(*sys.argv[1:])
