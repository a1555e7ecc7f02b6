"""A recording of steps on a device that samples: the phases of the loop, which no operator profile goes with."""

import json

import pytest

from castline.runtime.profile_options import ProfileOptions
from castline.runtime.profiler import Profiler
from castline.runtime.step_workload import StepShape, StepWorkload


@pytest.mark.parametrize("prefill", [0, 20])
def test_phases_of_steps_that_run_ahead(make_device_engine, tmp_path, capsys, prefill):
    """--profile must work for a GPU too, with every step and its shape, though the next is scheduled inside of it."""
    profiler = Profiler(ProfileOptions(str(tmp_path), 12))
    engine = make_device_engine(marks=profiler, num_blocks=100)
    profiler.attach(engine.device, engine.limits)
    StepWorkload(StepShape(batch=3, context=9, prefill=prefill), engine.core, engine.limits, 97).run(profiler)
    output = capsys.readouterr().out
    if prefill:
        assert "steps with prompts: 6, 4.0 sequences" in output
        assert "decode steps: 6, 3.0 sequences" in output, "each was begun before the next prompt came"
    else:
        assert output.startswith("decode steps: 12, 3.0 sequences and 3.0 tokens each")
    for phase in ("schedule", "batch", "executor", "sample", "commit"):
        assert f"    {phase} " in output
    (path,) = tmp_path.iterdir()
    slices = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sum(event["name"] == "step" for event in slices) == 12
    phases = {"receive", "schedule", "batch", "executor", "sample", "commit"}
    assert {event["name"] for event in slices} == {"step", *phases}
