"""config/flags.py for all commands: values and words in any order, what is suggested works, and all
that is wrong is said at once."""

import contextlib
import itertools
import shlex
import types

import pytest
from by_hand.fuzz_configs import suggested

from jaxtrain import (
    cli,
    config as cfg,
    convert,
    generate_command as generate,
    launch,
    show_schedule as schedule,
    train_command as train,
)
from jaxtrain.checkpoint import __main__ as checkpoint
from jaxtrain.config.errors import ConfigError, UsageError
from jaxtrain.config.flags import SHARED_FLAGS, Flag, apply, read_flags, setting_value, settled
from jaxtrain.config.rules.field_rules import field_violation
from jaxtrain.experiments import page, sweep
from jaxtrain.planner.command import calibrate, main as plan
from jaxtrain.planner.programs import compile_check
from jaxtrain.run.exit_status import RunError

COMMANDS = {
    "train": (*SHARED_FLAGS, *train.FLAGS),
    "plan": plan.FLAGS,
    "calibrate": calibrate.FLAGS,
    "schedule": schedule.FLAGS,
    "generate": generate.FLAGS,
    "launch": launch.FLAGS,
    "sweep": sweep.FLAGS,
    "page": page.FLAGS,
}

for module, name in ((checkpoint, "checkpoint"), (convert, "convert")):
    COMMANDS |= {f"{name} {each}": flags for each, flags in module.FLAGS.items()}
BEYOND = ("1e308", "1e400", "nan", "inf", "-inf", str(2**63), str(10**400))  # no number of a flag
NO_NUMBERS = ("four", "", "maybe", "0x10", "True", "[1]")
HOSTILE = (*NO_NUMBERS, *BEYOND, "-1", "-1000000000000", "19.8", "1 ", "１", "1_000")
TEXTS = (*HOSTILE, "(1,", "1,2", "[[1]]", "(nan,)", "None", "a" * 3000, "9" * 5000, "\udcff")
WORST = ("x", "nan", "１", str(10**400), "[[1]]", "a" * 3000, "9" * 5000)
FLAGS = (
    Flag("size", 0, "0: by itself", at_least=2, at_most=9),
    Flag("name", "", "a text"),
    Flag("yes", False, "a boolean"),
)


def read(*argv: str, flags: tuple[Flag, ...] = FLAGS, words: bool = False, config: bool = False):
    return read_flags(argv, "usage: x", flags, with_config=config, with_words=words)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_suggested_for_a_value_works_behind_it(command):
    """Also a flag's default, which may be given whatever its bounds are."""
    for flag, text in itertools.product(COMMANDS[command], HOSTILE):
        assert not read(f"--{flag.name}={flag.default}", flags=COMMANDS[command]).errors
        reading = read(wrong := f"--{flag.name}={text}", flags=COMMANDS[command])
        for error in reading.errors:
            words = suggested(f"error: {error}")
            assert words or text in (*NO_NUMBERS, *BEYOND)
            assert not words or not read(wrong, *words, flags=COMMANDS[command]).errors, str(error)


def test_every_text_is_a_value_or_refused():
    for (path, field), text in itertools.product(cfg.fields().items(), TEXTS):
        violation = field_violation(path, value := setting_value(path, text), field.default)
        if violation:
            error = ConfigError(path, value, violation.rule, fixes=[*violation.fixes])
            assert "\n" not in str(error)
        else:
            assert cfg.convert(path, value) == value
    refused = [bool(field_violation(path, "\0", f.default)) for path, f in cfg.fields().items()]
    assert all(refused)  # of a recipe: no argument has one


PARSED = {
    "train": lambda argv: cli.parse(["--cpu_devices=1", *argv], "", train.FLAGS),
    "plan": lambda argv: cli.parse_unchecked(
        ["--layout=data=1", *argv], "", plan.FLAGS, plan.planned
    ),
    "compile": lambda argv: settled(
        read_flags(["--topology=v5p:2x2x1", *argv], "", compile_check.FLAGS, with_config=True),
        compile_check._requested,
    ),
}
# one setting of each kind
KINDS = "mesh.stage train.seed optimizer.learning_rate mesh.elastic pipeline.remat parallel.zero"
TUPLES = "model.kinds pipeline.times model.biases data.text_fields train.init_from"


@pytest.mark.parametrize("path", f"{KINDS} {TUPLES}".split())
@pytest.mark.parametrize("command", PARSED)
def test_no_text_is_a_traceback(command, path):
    for text in WORST:
        with contextlib.suppress(RunError, UsageError, ConfigError):  # each is one line, status 2
            PARSED[command]([f"--config.{path}={text}"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("four", "--size='four' is not an integer"),
        ("1", "--size=1 must be at least 2: use --size=2"),
        ("10", "--size=10 must be at most 9: use --size=0"),
        ("4.8", "--size='4.8' is not an integer: use --size=5"),
        ("1.2", "--size='1.2' is not an integer: use --size=2"),
        ("1e3", "--size='1e3' is not an integer"),
        ("0.006k", "--size='0.006k' is not an integer: use --size=6"),
        (str(10**400), f"--size={'1' + 199 * '0'}… must be at most 9: use --size=0"),
    ],
)
def test_the_nearest_value(text, says):
    (error,) = read(f"--size={text}").errors
    assert str(error) == says


@pytest.mark.parametrize(
    ("argv", "values", "words"),
    [
        (["ls", "a", "--size", "3", "b"], {"size": 3}, ["ls", "a", "b"]),
        (["--size", "3", "ls", "a"], {"size": 3}, ["ls", "a"]),
        (["--yes", "ls", "a"], {"yes": True}, ["ls", "a"]),
        (["--yes", "false", "ls"], {"yes": False}, ["ls"]),
        (["ls", "--name", "-1", "a"], {"name": "-1"}, ["ls", "a"]),
        (["ls", "--name", "", "a"], {"name": ""}, ["ls", "a"]),
        (["ls", "--name=x", "--name", "y"], {"name": "y"}, ["ls"]),
        # a flag without a value is mended behind it
        (["ls", "--size", "--yes", "--size=4"], {"size": 4, "yes": True}, ["ls"]),
        (["ls", "--size=x", "--size=4"], {"size": 4}, ["ls"]),
    ],
    ids=" ".join,
)
def test_flags_and_words_in_any_order(argv, values, words):
    reading = read(*argv, words=True)
    assert not reading.errors and reading.words == words
    assert reading.values == {"size": 0, "name": "", "yes": False} | values


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--size"], "--size has no value: use --size=0"),
        (["--size=4", "--size"], "--size has no value: use --size=0"),
        (["--"], "argument '--' belongs to no flag: use two dashes before a NAME=VALUE, "),
        (["--="], "argument '--=' belongs to no flag: use two dashes before a NAME=VALUE, "),
        (["-n", "8"], "argument '-n' belongs to no flag: use two dashes before a NAME=VALUE, "),
        (
            ["-size=8"],
            "argument '-size=8' belongs to no flag: use two dashes before a NAME=VALUE, ",
        ),
        (["---size=8"], "---size is an unknown flag: use --size=8"),
        (["--si-ze=8"], "--si-ze is an unknown flag: use --size=8"),
        (["--help=no"], "--help='no' is a flag without a value: use --help"),
        (["--version=2"], "--version='2' is a flag without a value: use --version"),
        (["--name=" + "a" * 5000, "b" * 5000], "argument 'bbbb"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("words", [False, True])
def test_words_that_are_no_flags(argv, says, words):
    reading = read(*argv, words=words)
    if words and not argv[-1].startswith("-") and len(argv[-1]) > 1:
        assert reading.words == [argv[-1]]
        return
    (error,) = reading.errors
    assert str(error).startswith(says) and len(error.rule) < 300


# --- all that is wrong ----------------------------------------------------------------------------


def check(reading) -> types.SimpleNamespace:
    flags = reading.namespace
    if flags.size % 2:
        raise UsageError(f"--size={flags.size} is odd", {"size": flags.size + 1}, [flags.size + 3])
    if flags.size > 6 and not flags.yes:
        raise UsageError(f"--size={flags.size} is large", {"yes": True})
    if flags.name == "absent":
        raise UsageError("--name='absent' is no folder", advice="another one")
    return flags


def settle(*argv: str) -> str:
    with pytest.raises(UsageError) as error:
        settled(read(*argv), check)
    return str(error.value)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--size=3"], "--size=3 is odd: use --size=4 (or 6)"),
        (["--size=7"], "--size=7 is odd: use --size=8 --yes=true"),
        (
            ["--yes=x", "--size=y"],
            "--yes='x' is not a boolean: use --yes=true (and --size='y' is not an integer)",
        ),
        (["--name=absent"], "--name='absent' is no folder: use another one"),
        (
            ["--name=absent", "--size=1"],
            "--size=1 must be at least 2: use --size=2 (and --name='absent' is no folder: use "
            "another one)",
        ),
        (
            ["--size=7", "four", "--name=absent"],
            "--size=7 is odd: use --size=8 --yes=true (and argument 'four' belongs to no "
            "flag: use two dashes before a NAME=VALUE, "
            "and quotes around a value with spaces; --name='absent' is no folder: use another one)",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_all_that_is_wrong_is_said_at_once(argv, says):
    line = settle(*argv)
    assert line == says
    if (words := suggested(line)) and " (and " not in line:
        settled(read(*argv, *words), check)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_placeholders(command):
    for flag in COMMANDS[command]:
        reading = read(
            f"--{flag.name}=YOUR_VALUE", "YOUR_FOLDER", flags=COMMANDS[command], words=True
        )
        with pytest.raises(UsageError, match=f"^--{flag.name}=YOUR_VALUE, YOUR_FOLDER are placeh"):
            settled(reading, lambda reading: None)


def test_an_item_of_a_tuple_is_a_flag_of_its_own():
    """The last one of a name counts, and a flag of the whole tuple replaces those before it."""
    argv = [
        "--config.model.kinds.lost.heads=2",
        "--config.model.kinds=b.window=3,window.heads=2",
        "--config.model.kinds.window.rotary_base",
        "10000",
        "--config.model.kinds.b.window=4",
        "--config.model.block_settings.sizes=1,2",
    ]
    reading = read_flags(argv, "", COMMANDS["train"], with_config=True)
    model = apply(cfg.Config(), reading.overrides).model
    assert not reading.errors
    assert model.kinds == ("b.window=4", "window.heads=2", "window.rotary_base=10000")
    assert model.block_settings == ("sizes=1,2",)
    (error,) = read_flags(["--config.model.kinds.a.heads"], "", (), with_config=True).errors
    assert str(error) == "--config.model.kinds.a.heads has no value"
    assert read_flags(["--config.model.biases.qkv=1"], "", (), with_config=True).errors


def test_what_does_not_help_ends():
    """A fix that a check asks for again is none, and one that another fix undoes is not
    promised."""
    with pytest.raises(UsageError, match="^no: use --size=4 .and no.$"):
        settled(
            read("--size=5"), lambda reading: (_ for _ in ()).throw(UsageError("no", {"size": 4}))
        )
    wanted = itertools.cycle([4, 6])
    with pytest.raises(UsageError, match="^no$"):
        settled(
            read("--size=5"),
            lambda reading: (_ for _ in ()).throw(UsageError("no", {"size": next(wanted)})),
        )


def test_values_of_suggestions_are_quoted():
    line = settle("--name=a", "b c", "--size=3")
    assert shlex.split(line.partition(": use ")[2]) == ["--name=a b c", "--size=4"]
