"""Code of one's own that a setting names: a layer, a mixer, a loss, an optimizer. No jax by itself;
the code that is imported may need it.

    FILE.py:NAME         a Python file, by `find_file`
    package.module:NAME  an importable module

A config keeps the text as it was written, and not the path or a copy of the file: so a run and its
code can move to another machine together. A run's folder may be a stranger's, and commands that
read one run no file in it (`distrust`). `digest` tells whether a file has changed.
"""

import hashlib
import importlib
import importlib.util
import os
import pathlib
import sys
import traceback
import types
from typing import Any

from jaxtrain.config.errors import cut, nearly, one_line

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# Recipes and layers lie inside an installed package (pyproject.toml), and beside it in a checkout.
SHIPPED = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
_DISTRUSTED: set[pathlib.Path] = set()  # folders


class OwnCodeError(ValueError):
    """Code that is not there or cannot be imported; the text is one line, to be read after
    "field=value"."""


def load(text: str) -> Any:
    """What a setting names: the object NAME of a file or module, which is run once for each content
    of its file. Raises OwnCodeError, with the file's line for whatever goes wrong in it."""
    source, name = parts(text)
    module = _module_of_file(find_file(source)) if source.endswith(".py") else _imported(source)
    if not hasattr(module, name):
        near = nearly(name, public := [n for n in vars(module) if not n.startswith("_")], 0.6)
        has = f"it has {near}" if near else f"it has {cut(', '.join(public))}"
        raise OwnCodeError(f"names {name}, which {source} does not define: {has}")
    return getattr(module, name)


def parts(text: str) -> tuple[str, str]:
    """The file or module, and the name in it. Raises OwnCodeError for a text of another form."""
    source, _, name = text.rpartition(":")
    is_module = all(part.isidentifier() for part in source.split("."))
    if not name.isidentifier() or not (source.endswith(".py") or is_module):
        raise OwnCodeError("is not FILE.py:NAME or package.module:NAME")
    return source, name


def find_file(source: str) -> pathlib.Path:
    """The file of a path: relative to the current folder, else a shipped one, which may be written
    configs/layers/NAME.py or layers/NAME.py. Raises OwnCodeError where there is none."""
    path = pathlib.Path(os.path.expanduser(source))
    shipped = SHIPPED / pathlib.Path(*path.parts[path.parts[:1] == ("configs",) :])
    for file in (path, shipped):
        if file.is_file():
            if not _DISTRUSTED.isdisjoint((file := file.resolve()).parents):
                raise OwnCodeError(f"names a file of a run's folder, which is never run: {file}")
            return file
    folder = "" if path.is_absolute() else f" in {pathlib.Path.cwd()}"
    raise OwnCodeError(f"names no file: {source} does not exist{folder}")


def distrust(folder: str) -> None:
    """From now on, no file in a folder is run."""
    _DISTRUSTED.add(pathlib.Path(folder).resolve())


def digest(text: str) -> str:
    """The first 12 digits of the sha256 of a setting's file; "" for a module. Raises OwnCodeError
    where there is no file."""
    source, _ = parts(text)
    return _digest(find_file(source).read_bytes()) if source.endswith(".py") else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _imported(source: str) -> types.ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name and f"{source}.".startswith(f"{error.name}."):
            rule = f"names no module: {error.name} is not on Python's path (PYTHONPATH)"
            raise OwnCodeError(rule) from None
        raise _failure(source, "", error) from None
    except (Exception, SystemExit) as error:
        spec = importlib.util.find_spec(source)
        raise _failure(source, (spec and spec.origin) or "", error) from None


def _module_of_file(path: pathlib.Path) -> types.ModuleType:
    """The module of a file. Its folder is added to the end of Python's path, so that it can import
    its neighbours."""
    content = path.read_bytes()
    # A changed file is another module: a notebook trains with what its user sees.
    name = f"{path.stem}_{_digest(str(path).encode() + content)}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = types.ModuleType(name)
    module.__file__ = str(path)
    # dataclasses and annotations look a class's module up by its name
    sys.modules[name] = module
    try:
        exec(compile(content, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failure(path.name, str(path), error) from None
    return module


def _failure(source: str, file: str, error: BaseException) -> OwnCodeError:
    """The error for code that raises one while it is imported, with its last line in the file."""
    text = one_line(f"{type(error).__name__}: {error}")
    return OwnCodeError(f"cannot be imported: {source}{line_in(file, error)} raises {text}")


def line_in(file: str, error: BaseException) -> str:
    """ ", line 3,": the last line of a file by which an error has come; "" if it is in other files
    alone."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    return f", line {line}," if line else ""
