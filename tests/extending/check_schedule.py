"""The eager schedule is a right table with 1F1B's idle time; its picture is drawn into docs/."""

import subprocess
import sys

from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.clocks.simulate import simulate
from jaxtrain.schedule.clocks.times import Times
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.schedule.validator import check

results = []
for name in ("1f1b", "eager_1f1b"):
    table = make_table(TableSpec(name, 4, 1, 8, permute="late"))
    check(table)
    results.append(simulate(table, Times()))
assert results[0].step_time == results[1].step_time
assert max(results[1].peak_residuals) == 2 * 4 - 1

name, picture = "--schedule=eager_1f1b", "--svg=docs/schedules/eager_1f1b.svg"
command = [sys.executable, "-m", "jaxtrain.schedule", name, "--stages=4", "--microbatches=8"]
subprocess.run([*command, picture], check=True, stdout=subprocess.DEVNULL)
