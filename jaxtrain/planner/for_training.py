"""What the trainer's commands ask the planner for: the plan beside a run, the comparison with the
measured step, the dry run, a model's FLOPs, and flags that fit where memory was not there.

Rooms below the planner's ask for op times and kinds of devices (planner/step/planned_op_times.py).
No other module of the planner is imported outside of it (tests/test_imports.py).
"""

from jaxtrain.planner.layer.model import model_of
from jaxtrain.planner.programs.measured_step import AfterWarmUp
from jaxtrain.planner.programs.report import dry_run
from jaxtrain.planner.search.compare import plan_at_hand
from jaxtrain.planner.search.predict import Prediction
from jaxtrain.planner.search.what_if import fitting

__all__ = ["AfterWarmUp", "Prediction", "dry_run", "fitting", "model_of", "plan_at_hand"]
