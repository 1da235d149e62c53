"""`python -m jaxtrain.plan`: whether a run fits, how fast it is, how long it takes and how to lay it out, before anyone pays.

    recipe, kind of device  ─ --layout ─→  one layout, evaluated
                            ─ --devices ─→  the best of all layouts

Closed forms (costs/) and the exact clock of the schedule's table; nothing is compiled and jax is not imported.
"""

import dataclasses
import difflib
import json
import sys
import types
from collections.abc import Sequence

from jaxtrain import cli
from jaxtrain.config import Config, ConfigError, one_line
from jaxtrain.config.flags import SHARED_FLAGS, Flag
from jaxtrain.config.work import OURS, platform_of
from jaxtrain.costs import hardware as devices
from jaxtrain.costs.hardware import Hardware, HardwareError
from jaxtrain.costs.program import PROGRAMS
from jaxtrain.plan import layout_flag
from jaxtrain.plan.layout_flag import LayoutError
from jaxtrain.plan.prediction import predict
from jaxtrain.run.exit_status import ExitStatus, RunError

DESCRIPTION = """usage: jaxtrain plan --config=NAME|FILE --hardware=NAME|FILE --layout=KEY=VALUE,… [--tokens=N] [--json]
       (or python -m jaxtrain.plan …)

Says what a run needs and how fast it is on devices that need not be there, such as
  jaxtrain plan --config=gpt3_175b --hardware=a100-80gb --layout=data=8,stage=16,model=8,microbatch=1 --tokens=300e9

--layout is in the place of the recipe's mesh, microbatches, repeats, remat, ZeRO stage and schedule:
  data, stage, model, context, expert, replica            sizes of the mesh's axes; 1 where not named
  microbatch                                              sequences of a microbatch on a data shard
  repeats, remat, zero, schedule, offload, vocabulary     as in a recipe, whose they are where not named
A layout that does not fit is evaluated all the same.

What --json prints:
  step_time_s                   of a step
  model_tflops_per_device       attention counted in full; hardware_tflops_per_device, with what is computed again
  mfu, hfu                      the same over the peak
  memory_gib_per_device         of the fullest; fits, whether it has so much
  bubble_fraction               of the whole step
  tokens_per_s, train_days      days without a stop, null without --tokens
  layout                        as --layout has it"""
FLAGS = (
    next(flag for flag in SHARED_FLAGS if flag.name == "config"),
    Flag("hardware", "h100", f"kind of device: {', '.join(devices.known())}, or a JSON file of your own"),
    Flag("devices", 0, "number of devices; 0: those of --layout", at_least=1),
    Flag("layout", "", "evaluate this layout: KEY=VALUE,…"),
    Flag("assume", OURS, f"the program that trains: {', '.join(PROGRAMS)}"),
    Flag("tokens", 0.0, "tokens of the whole run, for days; 0: not known", at_least=0),
    Flag("json", False, "print the figures as one JSON object"),
)


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be planned. config: the recipe's with the flags over it, not checked; tokens: None if not known."""

    config: Config
    recipe: Config
    hardware: Hardware
    assume: str
    devices: int
    tokens: float | None


def main(argv: Sequence[str]) -> int:
    """The exit status: 0, or 2 and one line on stderr for flags that cannot work."""
    try:
        config, flags = cli.parse_unchecked(argv, DESCRIPTION, FLAGS)
        _plan(config, flags)
    except (ConfigError, RunError, HardwareError, LayoutError) as error:
        print(one_line(f"error: {error}"), file=sys.stderr, flush=True)
        return ExitStatus.BAD_CONFIG
    return ExitStatus.FINISHED


def _plan(config: Config, flags: types.SimpleNamespace) -> None:
    request = _request(config, flags)
    if not flags.layout:
        raise cli.FlagsError("--layout is not given: use --layout=data=8")
    prediction = predict(_laid_out(request, flags.layout), request.hardware, request.assume, request.tokens)
    print(json.dumps(prediction.figures(), indent=None if flags.json else 2))


def _request(config: Config, flags: types.SimpleNamespace) -> Request:
    """The flags, checked. Raises FlagsError or HardwareError."""
    if flags.assume not in PROGRAMS:
        near = difflib.get_close_matches(flags.assume, PROGRAMS, 1, 0.0)[0]
        raise cli.FlagsError(f"--assume={flags.assume!r} is not known ({', '.join(PROGRAMS)}): use --assume={near}")
    hardware = devices.load(flags.hardware)
    if config.precision.compute not in hardware.peak_tflops:
        dtypes = [dtype for dtype in hardware.peak_tflops if dtype in ("bfloat16", "float32")]
        rule = f"precision.compute={config.precision.compute!r} has no peak in --hardware={flags.hardware}"
        raise cli.FlagsError(f"{rule}: use --config.precision.compute={(dtypes or ['bfloat16'])[0]}")
    return Request(config, flags.recipe, hardware, flags.assume, flags.devices, flags.tokens or None)


def _laid_out(request: Request, text: str) -> Config:
    """The resolved config with the layout that --layout names. Raises LayoutError."""
    values = layout_flag.read(text)
    count = layout_flag.devices(values)
    if request.devices and request.devices != count:
        rest = count // values.get("data", 1)
        fits = f"data={request.devices // rest}" if request.devices % rest == 0 else ""
        rule = f"--devices={request.devices} and --layout, which is for {count}, are not the same number"
        raise LayoutError(f"{rule}: use --devices={count}{f' (or {fits} in --layout)' * bool(fits)}")
    config = layout_flag.apply(request.config, values)
    layout_flag.check(config, values, platform_of(request.hardware), request.recipe)
    return config.resolve()


if __name__ == "__main__":
    sys.exit(cli.run_quietly(main, sys.argv[1:]))
