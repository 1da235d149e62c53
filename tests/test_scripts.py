"""scripts/, and the scripts of tests/ that make the same environment: it is made once, again when
something changed or broke off, and flags pass through.

With stand-ins for python3, which makes an environment whose python writes down what it is asked to
do, and for uv.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from support import ROOT

DISTRIBUTION = "<--dist=loadgroup><--no-loadscope-reorder>"
OTHERS = ("tests/by_hand/try_docs.sh", "tests/support/object_store.sh")
STAND_IN = f"""#!/usr/bin/env bash
case "$*" in
    *version_info*) echo "${{FAKE_VERSION:-3.12}}" ;;
    "-c import ensurepip, venv") exit "${{FAKE_NO_VENV:-0}}" ;;
    "-m venv --without-pip "*)
        echo "venv" >>"$FAKE_LOG"
        mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m ensurepip --default-pip") touch "$(dirname "$0")/pip" && echo "ensurepip" >>"$FAKE_LOG" ;;
    "-c import pip") [[ -e $(dirname "$0")/pip ]] ;;
    "-m pip --python "*" --version") exit "${{FAKE_OLD_PIP:-0}}" ;;
    "-m pip --python "*)
        if [[ ${{*: -1}} == pip ]]; then touch "$(dirname "$4")/pip"; fi
        exec "$0" "${{@:1:2}}" "${{@:5}}" ;;
    *object_store.py* | *try_docs.py*) echo "$(basename "$1") ${{*:2}}" >>"$FAKE_LOG" ;;
    "-m pip install --quiet --disable-pip-version-check "*)
        if [[ $* == *--target* ]]; then mkdir -p "${{@:9:1}}"; fi
        echo "pip ${{*:6}}" | sed "s|$FAKE_ROOT/||g" >>"$FAKE_LOG"
        sleep "${{FAKE_SLOW:-0}}"
        exit "${{FAKE_PIP:-0}}" ;;
    "-m "*) printf '<%s>' "${{@:2}}" "$PWD" >>"$FAKE_LOG"; echo >>"$FAKE_LOG" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
UV = """#!/usr/bin/env bash
case "$*" in
    --version) [[ -n $FAKE_UV ]] ;;
    *)
        echo "uv $*" | sed "s|$FAKE_ROOT/||g" >>"$FAKE_LOG"
        [[ $FAKE_UV == works ]] || exit 1
        if [[ $1 == venv ]]; then
            mkdir -p "${@: -1}/bin"
            cp "$(command -v python3)" "${@: -1}/bin/python" && touch "${@: -1}/bin/pip"; fi ;;
esac
"""


@pytest.fixture
def repository(tmp_path):
    """A folder, with a space in its name, of the scripts and of what an installation depends
    on."""
    root = tmp_path / "a repository"
    root.mkdir()
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copytree(ROOT / ".ci", root / ".ci")
    shutil.copytree(ROOT / "requirements", root / "requirements")
    for name in (*OTHERS, "requirements.txt", "pyproject.toml", "jaxtrain/__init__.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (tmp_path / "bin").mkdir()
    for name, text in (("python3", STAND_IN), ("uv", UV)):
        stand_in = tmp_path / "bin" / name
        stand_in.write_text(text)
        stand_in.chmod(0o755)
    return root


def start(root: pathlib.Path, script: str, *arguments: str, **environment: str) -> subprocess.Popen:
    variables = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHON", "JAXTRAIN_EXTRAS", "JAXTRAIN_TEST_WORKERS")
    }
    variables |= {
        "PATH": f"{root.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "FAKE_LOG": str(root.parent / "log"),
        "FAKE_ROOT": str(root),
    }
    command = [str(root / script), *arguments]
    return subprocess.Popen(
        command,
        env=variables | environment,
        cwd=root.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    root: pathlib.Path, script: str, *arguments: str, **environment: str
) -> tuple[int, str, list[str]]:
    """(status, stderr, what the stand-in was asked to do)"""
    log = root.parent / "log"
    log.write_text("")
    process = start(root, script, *arguments, **environment)
    _, err = process.communicate(timeout=60)
    return process.returncode, err, steps(root, log.read_text().splitlines())


def pinned(root: pathlib.Path) -> list[str]:
    """The packages that training needs, as they are given to pip."""
    lines = [
        line
        for name in ("requirements.txt", "requirements/indirect.txt", "requirements/build.txt")
        for line in (root / name).read_text().splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


def steps(root: pathlib.Path, log: list[str]) -> list[str]:
    """A log in which the several pips that install all pinned packages side by side are one line,
    PINNED, and the one that installs the package itself is PACKAGE."""
    log = [PACKAGE if line == f"{PACKAGE} {root}" else line for line in log]
    pips = [
        line
        for line in log
        if line.startswith("pip --no-compile --no-deps ")
        and not any(flag in line for flag in ("--target", "--no-build-isolation"))
    ]
    packages = [
        package for package in pinned(root) for line in pips if f" {package} " in f"{line} "
    ]
    if not pips or sorted(packages) != sorted(pinned(root)):
        return log
    return [PINNED if line == pips[0] else line for line in log if line not in pips[1:]]


PINNED = "pip for all pinned packages"
PACKAGE = "pip --no-compile --no-deps --no-build-isolation -e"
INSTALL = "pip --no-compile -r requirements.txt"


def trained(root: pathlib.Path, *arguments: str) -> str:
    return "".join(f"<{word}>" for word in ("jaxtrain.train", *arguments, root.parent))


def test_install_once_and_pass_flags_through(repository):
    status, err, log = run(repository, "scripts/train.sh", "--config.train.sample_prompt=a b")
    assert status == 0, err
    assert log == ["venv", PINNED, PACKAGE, trained(repository, "--config.train.sample_prompt=a b")]
    status, err, log = run(repository, "scripts/train.sh")
    assert (status, err, log) == (0, "", [trained(repository)])


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "requirements.txt").write_text("jax==1\n"),
        lambda root: (root / "requirements/indirect.txt").write_text("numpy==1\n"),
        lambda root: shutil.rmtree(root / ".venv"),
        lambda root: (root / ".venv" / "bin" / "python").unlink(),
    ],
    ids=["requirements", "indirect requirements", "no environment", "broken environment"],
)
def test_install_again_after_a_change(repository, change):
    run(repository, "scripts/train.sh")
    change(repository)
    assert PINNED in run(repository, "scripts/train.sh")[2]
    assert run(repository, "scripts/train.sh")[2] == [trained(repository)]


@pytest.mark.parametrize("name", ["pyproject.toml", "jaxtrain/__init__.py"])
def test_the_package_is_installed_again_after_a_change_of_its_metadata(repository, name):
    """Its requirements are not."""
    run(repository, "scripts/train.sh")
    (repository / name).write_text("another")
    assert run(repository, "scripts/train.sh")[2] == [
        PACKAGE,
        trained(repository),
    ]
    assert run(repository, "scripts/train.sh")[2] == [trained(repository)]


def test_a_moved_checkout_installs_the_package_again(repository):
    run(repository, "scripts/train.sh")
    moved = repository.rename(repository.with_name("moved"))
    assert run(moved, "scripts/train.sh")[2] == [PACKAGE, trained(moved)]


def test_a_linked_environment_keeps_the_package_of_its_own_checkout(repository):
    run(repository, "scripts/train.sh")
    (repository / ".venv").rename(repository.parent / "venv")
    (repository / ".venv").symlink_to(repository.parent / "venv")
    (repository / "pyproject.toml").write_text("another")
    assert run(repository, "scripts/train.sh")[2] == [trained(repository)]


def test_a_command_that_only_installs(repository):
    status, err, log = run(repository, "scripts/install.sh")
    assert (status, log) == (0, ["venv", PINNED, PACKAGE]), err
    assert run(repository, "scripts/install.sh")[2] == []
    assert run(repository, "scripts/train.sh")[2] == [trained(repository)]


def test_a_complete_installation_writes_nothing(repository):
    """The checkout may be read-only by then."""
    run(repository, "scripts/install.sh")
    shutil.rmtree(repository / ".cache")
    (repository / ".cache").write_text("no folder can be made here")
    assert run(repository, "scripts/train.sh")[:2] == (0, "")


def test_an_environment_gets_its_own_pip_first_where_python_has_none_that_can_install_into_it(
    repository,
):
    assert run(repository, "scripts/train.sh", FAKE_OLD_PIP="1")[2] == [
        "venv",
        "ensurepip",
        PINNED,
        PACKAGE,
        trained(repository),
    ]


def test_uv_is_used_where_it_works(repository):
    status, err, log = run(repository, "scripts/train.sh", FAKE_UV="works")
    install = "uv pip install --quiet --python .venv/bin/python"
    assert status == 0, err
    assert log[0].startswith("uv venv --quiet --seed --python /") and log[0].endswith(
        "bin/python3 .venv"
    )
    assert log[1:] == [
        f"{install} -r requirements.txt -r requirements/indirect.txt -r requirements/build.txt",
        f"{install} --no-deps --no-build-isolation -e {repository}",
        trained(repository),
    ]
    status, err, log = run(repository, "scripts/test.sh", "--full", FAKE_UV="works")
    assert log[0] == f"{install} -r requirements.txt -r requirements/dev.txt"
    assert log[1] == f"{install} --no-deps --target .venv-compilers -r requirements/compilers.txt"


def test_pip_goes_on_where_uv_cannot(repository):
    status, err, log = run(repository, "scripts/train.sh", FAKE_UV="fails")
    assert status == 0 and err.count("uv could not: trying pip\n") == 2
    assert [line for line in log if not line.startswith("uv ")] == [
        "venv",
        PINNED,
        PACKAGE,
        trained(repository),
    ]


def test_another_python_makes_another_environment(repository):
    run(repository, "scripts/train.sh")
    assert run(repository, "scripts/train.sh", FAKE_VERSION="3.13")[2][:2] == ["venv", PINNED]


def test_an_install_that_broke_off_is_made_anew(repository):
    status, err, log = run(repository, "scripts/train.sh", FAKE_PIP="1")
    assert status == 2 and err.splitlines()[-1].startswith("error: pip could not install")
    assert log == ["venv", PINNED]
    assert run(repository, "scripts/train.sh")[2] == ["venv", PINNED, PACKAGE, trained(repository)]


@pytest.mark.skipif(shutil.which("flock") is None, reason="calls wait for each other by flock")
def test_two_calls_at_a_time_install_once(repository):
    log = repository.parent / "log"
    calls = [start(repository, "scripts/train.sh", FAKE_SLOW="0.5") for _ in range(2)]
    assert [call.wait(timeout=60) for call in calls] == [0, 0]
    [call.communicate() for call in calls]
    lines = steps(repository, log.read_text().splitlines())
    assert sorted(lines) == sorted(
        ["venv", PINNED, PACKAGE, trained(repository), trained(repository)]
    )


def test_an_accelerator_s_extras_are_remembered(repository):
    assert (
        run(repository, "scripts/train.sh", JAXTRAIN_EXTRAS="cuda13")[2][3]
        == f"{INSTALL} -r requirements/cuda13.txt"
    )
    assert run(repository, "scripts/train.sh")[2] == [trained(repository)]
    status, err, log = run(repository, "scripts/train.sh", JAXTRAIN_EXTRAS="cuda")
    assert (status, log) == (2, []) and err.startswith(
        "error: JAXTRAIN_EXTRAS=cuda is not known: use JAXTRAIN_EXTRAS=cuda13 or "
    )


CHECKS = ["<ruff><check><.>", "<ruff><format><--check><.>", "<mypy>"]


@pytest.mark.parametrize("script", ["scripts/test.sh", ".ci/run"])
def test_tests(repository, script):
    """All four checks, in the repository's folder, by as many workers as cores; the development
    requirements are added to the environment that training made."""
    run(repository, "scripts/train.sh")
    status, err, log = run(repository, script, "-k", "a b")
    assert status == 0, err
    cores = subprocess.run(["nproc"], capture_output=True, text=True, check=True).stdout.strip()
    steps = [*CHECKS, f"<pytest><-n><{cores}>{DISTRIBUTION}<-k><a b>"]
    assert log == [
        f"{INSTALL} -r requirements/dev.txt",
        *(f"{step}<{repository}>" for step in steps),
    ]
    assert (
        run(repository, script, JAXTRAIN_TEST_WORKERS="3")[2][-1]
        == f"<pytest><-n><3>{DISTRIBUTION}<{repository}>"
    )


def test_the_long_tests_have_their_compilers_and_store(repository):
    """In folders of their own, once, and again after a change."""
    run(repository, "scripts/train.sh")
    compilers = "pip --no-compile --no-deps --target .venv-compilers -r requirements/compilers.txt"
    _, _, log = run(
        repository, "scripts/test.sh", "--full", "--part=2/4", JAXTRAIN_TEST_WORKERS="1"
    )
    assert (
        log[1] == compilers
        and log[2] == compilers.replace("compilers", "store")
        and log[3] == compilers.replace("compilers", "transformers")
        and log[-1] == f"<pytest><-n><1>{DISTRIBUTION}<--full><--part=2/4><{repository}>"
    )
    assert compilers not in run(repository, "scripts/test.sh", "--full")[2]
    (repository / "requirements/compilers.txt").write_text("libtpu==1\n")
    assert compilers not in run(repository, "scripts/test.sh")[2]
    assert run(repository, "scripts/test.sh", "--full", FAKE_PIP="1")[0] == 2
    assert compilers in run(repository, "scripts/test.sh", "--full")[2]


def test_the_trial_of_the_documents(repository):
    assert run(repository, "tests/by_hand/try_docs.sh", "--part=1/2")[2] == [
        "venv",
        PINNED,
        PACKAGE,
        "try_docs.py --part=1/2",
    ]


def test_the_object_store(repository):
    status, err, log = run(repository, "tests/support/object_store.sh")
    assert (
        (status, log)
        == (
            2,
            [],
        )
        and err
        == "error: tests/support/object_store.sh needs a folder for its data: "
        "tests/support/object_store.sh FOLDER [BUCKET]\n"
    )
    status, err, log = run(repository, "tests/support/object_store.sh", "data", "bucket")
    assert status == 0, err
    assert (
        log[-2].endswith("--target .venv-store -r requirements/store.txt")
        and log[-1] == "object_store.py data bucket"
    )


@pytest.mark.parametrize(
    "environment, message",
    [
        (
            {"FAKE_VERSION": "3.10"},
            "error: python3 is Python 3.10: use 3.11, 3.12 or 3.13, by PYTHON=/path/to/python ",
        ),
        (
            {"FAKE_VERSION": "3.14"},
            "error: python3 is Python 3.14: use 3.11, 3.12 or 3.13, by PYTHON=/path/to/python ",
        ),
        (
            {"FAKE_NO_VENV": "1"},
            "error: python3 has no venv module: install it (Debian, Ubuntu: apt install "
            "python3.12-venv)",
        ),
        (
            {"PYTHON": "/none"},
            "error: /none is not there: install Python 3.11, 3.12 or 3.13, or set "
            "PYTHON=/path/to/python",
        ),
    ],
)
def test_what_cannot_be(repository, environment, message):
    status, err, log = run(repository, "scripts/train.sh", **environment)
    assert status == 2 and err.startswith(message) and err.count("\n") == 1 and log == []
    assert not (repository / ".venv").exists()


def test_every_requirement_is_pinned():
    for name in ["requirements.txt", *sorted(map(str, ROOT.glob("requirements/*.txt")))]:
        lines = [
            line
            for line in (ROOT / name).read_text().splitlines()
            if line and not line.startswith("#")
        ]
        assert lines and all("==" in line.partition(";")[0] for line in lines)
