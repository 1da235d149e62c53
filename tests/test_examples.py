"""The examples in docstrings that users meet do what they say. Those of jaxtrain/api.py, which
train and compile, run with docs/python.md (test_api.py)."""

import doctest
import importlib

import pytest

# module → the functions and classes that have an example
EXAMPLES = {
    "config.errors": "ConfigError",
    "config.paths": "entry_of fields flags_of get replace",
    "config.recipes": "find_recipe load_recipe",
    "config.rules.mesh_rules": "on_mesh",
    "config.states": "Config Config.resolve",
    "data.tokenizer": "ByteTokenizer load_tokenizer",
    "devices.mesh": "make_mesh",
    "pipeline.setup": "make_setup",
    "planner.layer.hardware": "load",
    "planner.search.predict": "predict",
    "run.exit_status": "ExitStatus",
    "schedule.by_name": "make_table",
    "schedule.clocks.simulate": "simulate",
    "schedule.clocks.times": "Times",
    "schedule.drawing": "text",
    "schedule.slots": "assign_slots",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name, capsys):
    module = importlib.import_module(f"jaxtrain.{name}")
    runner = doctest.DocTestRunner()
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    for test in found:
        runner.run(test)
    assert runner.failures == 0, capsys.readouterr().out
    names = [test.name.removeprefix(f"{module.__name__}.") for test in found]
    assert names == EXAMPLES[name].split()
