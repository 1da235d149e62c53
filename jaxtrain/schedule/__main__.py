"""`python -m jaxtrain.schedule`: runs show_schedule.py, which imports rooms above this one."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxtrain.show_schedule", run_name="__main__", alter_sys=True)
