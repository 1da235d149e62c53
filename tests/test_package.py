"""Installed as a package: what the wheel holds, the command `jaxtrain`, and that both work from a
folder that knows nothing of this one."""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support import ROOT

from jaxtrain import __main__ as command, __version__

FILES = [
    path
    for kind in ("py", "json", "html", "txtpb")
    for path in (ROOT / "jaxtrain").rglob(f"*.{kind}")
]
SOURCES = {path.relative_to(ROOT).as_posix() for path in FILES}
RECIPES = {f"jaxtrain/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.py")}
# What pip does, by setuptools alone: each hook of PEP 517 in a process of its own.
BUILD = (
    "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + "
    "sys.argv[1])(sys.argv[2]))"
)


def build(kind: str, source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """The sdist, wheel or editable wheel of a source folder."""
    words = [sys.executable, "-c", BUILD, kind, str(target)]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return target / done.stdout.splitlines()[-1]


def pip_install(wheel: pathlib.Path, target: pathlib.Path) -> None:
    words = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        f"--target={target}",
        str(wheel),
    ]
    subprocess.run([sys.executable, *words], check=True, timeout=120)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> pathlib.Path:
    """A copy of this checkout: building leaves files in it."""
    folder = tmp_path_factory.mktemp("checkout") / "jaxtrain"
    patterns = ".git .venv* .cache .*_cache __pycache__ *.egg-info build dist runs golden".split()
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*patterns))
    return folder


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> pathlib.Path:
    """The wheel that is built from what the sdist holds."""
    folder = tmp_path_factory.mktemp("built")
    shutil.unpack_archive(build("sdist", checkout, folder), folder, filter="data")
    return build("wheel", folder / f"jaxtrain-{__version__}", folder)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
    """A folder with the installed package, and jaxtrain's command in its bin/."""
    folder = tmp_path_factory.mktemp("installed")
    pip_install(wheel, folder)
    return folder


def run(
    installed: pathlib.Path, folder: pathlib.Path, *words: str, timeout: float = 60
) -> subprocess.CompletedProcess:
    """A command in a folder, of the installed package: `jaxtrain …` is its command, `-m …` a
    module."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA_"))}
    clean |= {
        "PYTHONPATH": str(installed),
        "JAXTRAIN_CACHE": str(folder / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    program = [str(installed / "bin" / "jaxtrain")] if words[0] == "jaxtrain" else [words[0]]
    done = subprocess.run(
        [sys.executable, *program, *words[1:]],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert str(ROOT) not in done.stdout + done.stderr, (
        "this checkout is used, not the installed package"
    )
    return done


# --- requirements ---------------------------------------------------------------------------------


def pins(name: str) -> dict[str, Requirement]:
    """The requirements of a file that are for this Python and machine, by the names of the
    packages."""
    lines = [
        line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")
    ]
    return {
        canonicalize_name(r.name): r
        for r in map(Requirement, lines)
        if r.marker is None or r.marker.evaluate()
    }


def needs(name: str, extras: frozenset[str]) -> list[Requirement]:
    """What an installed package needs by its metadata, with these extras of its own."""
    listed = [Requirement(line) for line in importlib.metadata.requires(name) or []]
    return [
        r
        for r in listed
        if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def test_all_that_the_requirements_need_is_pinned():
    """scripts/train.sh installs the lines of the two files, and looks for nothing that they
    need."""
    direct, indirect = pins("requirements.txt"), pins("requirements/indirect.txt")
    assert not direct.keys() & indirect.keys(), "each package stands in one of the files"
    reached = {(name, frozenset(requirement.extras)) for name, requirement in direct.items()}
    unread = list(reached)
    while unread:
        name, extras = unread.pop()
        for need in needs(name, extras):
            package, version = canonicalize_name(need.name), importlib.metadata.version(need.name)
            assert package in direct | indirect, (
                f"{name} needs {package}: add {package}=={version} to requirements/indirect.txt"
            )
            assert str((direct | indirect)[package].specifier) == f"=={version}", (
                f"{package} {version} is installed, another one is pinned"
            )
            assert need.specifier.contains(version, prereleases=True), f"{name} needs {need}"
            if (package, frozenset(need.extras)) not in reached:
                reached.add((package, frozenset(need.extras)))
                unread.append((package, frozenset(need.extras)))
    unused = indirect.keys() - {package for package, _ in reached}
    assert not unused, f"nothing needs {unused}: delete them from requirements/indirect.txt"


# --- the wheel ------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_the_recipes_and_no_more(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {
            name
            for name in archive.namelist()
            if not name.startswith(f"jaxtrain-{__version__}.dist-info/")
        }
    assert names == SOURCES | RECIPES, "pyproject.toml lists the packages"


def test_its_metadata(installed):
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    assert (found.name, found.version) == ("jaxtrain", __version__)
    pinned = [
        line
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    ]
    required = [line for line in found.requires or [] if "extra ==" not in line]
    bare = lambda lines: sorted(line.replace(" ", "").replace("'", '"') for line in lines)
    assert bare(required) == bare(pinned)


@pytest.mark.parametrize(
    "words, status, said",
    [
        *(
            (["jaxtrain", name, "--help"], 0, f"usage: jaxtrain {name} ")
            for name in command.COMMANDS
        ),
        (["jaxtrain", "--version"], 0, f"jaxtrain {__version__}"),
        (["-m", "jaxtrain", "--version"], 0, f"jaxtrain {__version__}"),
        (["jaxtrain", "train", "--version"], 0, f"jaxtrain {__version__}"),
        (
            ["jaxtrain", "train", "--config.mesh.model=3"],
            2,
            "error: mesh.model=3 does not divide model.heads=4",
        ),
        (
            ["-m", "jaxtrain.train", "--config=gpt2_124m", "--config.mesh.model=5"],
            2,
            "error: mesh.model=5 does not divide model.heads=12",
        ),
        (["jaxtrain", "train", "--config=configs/tinny.py"], 2, "use --config=tiny\n"),
        (["jaxtrain", "schedule", "--stages=2", "--microbatches=3"], 0, "1f1b"),
        (["jaxtrain", "generate", "--workdir=none"], 2, "error: --workdir='none' does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_work_in_an_empty_folder(installed, tmp_path, words, status, said):
    done = run(installed, tmp_path, *words)
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True), done
    assert os.listdir(tmp_path) == []


def test_launch_starts_the_installed_package(installed, tmp_path):
    """Also where a folder of this name, such as a checkout of something else, is in the present
    one."""
    (tmp_path / "jaxtrain").mkdir()
    (tmp_path / "jaxtrain" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    done = run(
        installed,
        tmp_path,
        "jaxtrain",
        "launch",
        "--processes=1",
        "--",
        "--config=gpt2_124m",
        "--config.mesh.model=5",
    )
    assert (
        done.returncode == 2
        and "[0] error: mesh.model=5 does not divide model.heads=12" in done.stderr
    ), done


def test_an_editable_install_has_the_checkout_s_recipes(checkout, tmp_path):
    pip_install(build("editable", checkout, tmp_path), tmp_path / "site")
    program = (
        "import site, sys; site.addsitedir(sys.argv[1]); sys.path.append(sys.argv[2]); "
        "from jaxtrain.config import recipes; print(recipes.find_recipe('tiny'))"
    )
    # -S: without this checkout, which scripts/test.sh has installed into this environment
    others = sysconfig.get_path("purelib")
    words = [sys.executable, "-S", "-c", program, str(tmp_path / "site"), others]
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        words, cwd=tmp_path, env=clean, capture_output=True, text=True, check=True, timeout=60
    )
    assert pathlib.Path(done.stdout.strip()) == checkout / "configs" / "tiny.py"


@pytest.mark.full
def test_an_installed_package_trains_and_writes_text(installed, tmp_path):
    flags = ["--config.train.steps=2", "--config.train.sample_tokens=0"]
    done = run(installed, tmp_path, "jaxtrain", "train", *flags, timeout=600)
    assert done.returncode == 0, done
    assert {"metrics.jsonl", "loss.png", "config.json", "checkpoints"} <= {
        *os.listdir(tmp_path / "runs" / "tiny")
    }
    done = run(
        installed,
        tmp_path,
        "jaxtrain",
        "generate",
        "--workdir=runs/tiny",
        "--prompt=def",
        "--tokens=5",
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.startswith("def"), done


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_names_the_commands(capsys, argv):
    assert command.main(argv) == 0
    out = capsys.readouterr().out
    for name, doc in command.COMMANDS.items():
        assert f"    {name} " in out and doc in out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["trian"], "'trian' is an unknown command: use jaxtrain train"),
        (["Launch", "--"], "'Launch' is an unknown command: use jaxtrain launch"),
        (["help"], "'help' is an unknown command: use jaxtrain --help"),
        (["version"], "'version' is an unknown command: use jaxtrain --version"),
        (
            ["xyz"],
            "'xyz' is an unknown command: use jaxtrain train, data, plan, generate, schedule, "
            "checkpoint, convert, launch, compare, page, sweep, track",
        ),
        (
            [""],
            "'' is an unknown command: use jaxtrain train, data, plan, generate, schedule, "
            "checkpoint, convert, launch, compare, page, sweep, track",
        ),
        (
            ["--config=tiny"],
            "'--config=tiny' stands in the place of a command: use jaxtrain train --config=tiny",
        ),
        (
            ["--stages=4", "schedule"],
            "'--stages=4' stands before the command: use jaxtrain schedule and then the flags",
        ),
    ],
)
def test_an_unknown_command(capsys, argv, message):
    assert command.main(argv) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")
