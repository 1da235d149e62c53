"""Runs docs/python.md as one program, as a notebook would: its blocks one after the other in this
process, then the examples of jaxtrain/api.py, then what must not end the process. In a folder of
its own; the last line of standard output is JSON with what happened.

jax is imported first, as many notebooks do.
"""

import doctest
import json
import pathlib
import re
import sys

import jax  # noqa: F401

import jaxtrain
from jaxtrain import api
from jaxtrain.config.recipes import recipe_text
from jaxtrain.run import streams

ROOT = pathlib.Path(__file__).parents[2]


def blocks() -> list[str]:
    """The page's blocks of Python."""
    text = (ROOT / "docs" / "python.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def refusal(**arguments) -> list[str]:
    """The status and the text of the error of a call of `train`."""
    try:
        return [jaxtrain.train(**arguments).status.name, ""]
    except jaxtrain.RunError as error:
        return [error.status.name, str(error)]


def main() -> None:
    page: dict = {}
    for block in blocks():
        exec(block, page)
    small = jaxtrain.replace(jaxtrain.load_recipe("tiny"), page["small"])
    pathlib.Path("mine.py").write_text(recipe_text(small, "The page's model."))
    streams.log = lambda *lines: None  # the examples show no log
    runner = doctest.DocTestRunner()
    examples = [test for test in doctest.DocTestFinder().find(api) if test.examples]
    for test in examples:
        runner.run(test)
    report = {
        "losses": page["longer"].losses,
        "first": page["run"].status.name,
        "text": jaxtrain.generate("runs/first", "def ", tokens=8),
        "metrics": {name: float(value) for name, value in page["metrics"].items()},
        "step": page["step"].config.train.steps,
        "best": page["best"].figures()["layout"],
        "examples": [test.name for test in examples],
        "failures": runner.failures,
        "no recipe": refusal(recipe="tinny"),
        "no setting": refusal(changes={"mesh.modell": 2}),
        "no data": refusal(recipe="mine.py", changes={"data.source": "none.txt"}),
        "other devices": refusal(recipe="mine.py", cpu_devices=4),
        "still functions": [callable(getattr(jaxtrain, n)) for n in ("train", "generate", "plan")],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
