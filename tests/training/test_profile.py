"""A trace that cannot be written: a line says so, and the run goes on without another."""

import jax
import pytest

from jaxtrain.run.wall_clock import WallClock
from jaxtrain.training.profile import WARM_UP, Profile


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: run/profile/plugins/x.xplane.pb; No space left on device"
        ),
        OSError(28, "No space left on device"),
    ],
    ids=["jax", "system"],
)
def test_a_disk_that_is_full_when_the_trace_ends(tmp_path, monkeypatch, error):
    """jax keeps the trace, and would begin no other: where the run goes back and comes to its first
    step again, none is begun."""
    begun, said = [], []

    def stop_trace():
        raise error

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: begun.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", stop_trace)
    profile = Profile(tmp_path, 0, 2, WallClock(), said.append)
    for _ in range(2):
        for at in range(WARM_UP + 3):
            profile.before(at)
            profile.after(at + 1, jax.numpy.zeros(1))
        profile.go_back(None)
    profile.close()
    (line,) = said
    assert line.startswith(f"warning: {tmp_path} cannot be written (") and line.endswith(
        "No space left on device): training goes on without it"
    )
    assert len(begun) == 1 and profile.step_time_s is not None


def test_programs_of_several_steps_end_where_the_trace_begins_and_ends(tmp_path):
    profile = Profile(tmp_path, 10, 3, WallClock(), print)
    assert [at for at in range(10, 20) if profile.stops(at)] == [12, 15]
    assert not any(Profile(tmp_path, 0, 0, WallClock(), print).stops(at) for at in range(9))
