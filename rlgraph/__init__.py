"""RL post-training of LLMs as dataflow graphs: declare stages as nodes, compile them to a plan, run the plan on Ray.

What a recipe needs is here; the rest is in `losses`, `estimators`, `optim`, `options`, `stages`, `agents`, `planning`, `runs`, `extend` and
`errors`.

A public name is imported when it is first asked for: `import rlgraph` takes milliseconds, and a worker loads only what it runs.
"""

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# The public names by their modules: lines `from MODULE import NAME as NAME` of the file that type checkers read.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_NAMES = {line.split()[-1]: line.split()[1] for line in _STUB.splitlines() if line.startswith("from rlgraph")}
__all__ = [*_NAMES]
# Modules that hold names by subject. Those were names of the package itself, and are found there still, with a warning.
_SUBJECTS = [name for name, module in _NAMES.items() if module == __name__ and Path(__file__).with_name(f"{name}.py").is_file()]


class _Package(ModuleType):
    def __reduce__(self) -> tuple[Any, ...]:  # a function that is sent by value may name this package: it is imported there
        return import_module, (__name__,)

    # The import system names a module in its package when it is imported: not over a public name, as `rlgraph.config`, the function.
    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


# A module's `__getattr__` cannot say how it is pickled, nor what an import may set: only its class can, which Python lets a module change.
sys.modules[__name__].__class__ = _Package
if sys.excepthook is sys.__excepthook__:  # an error that ends a program shows the user's lines, not those of this package
    sys.excepthook = lambda *raised: import_module("rlgraph.errors").hook(*raised)


def __getattr__(name: str) -> Any:
    # A public name, or a module of this package: `rlgraph.errors` needs no import of its own.
    if name in _NAMES:
        found = vars(import_module(_NAMES[name]))
        value = found[name] if name in found else import_module(f"{_NAMES[name]}.{name}")
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        value = import_module(f"{__name__}.{name}")
    else:
        return _by_old_spelling(name)
    globals()[name] = value
    return value


def spelling(name: str) -> str:
    """Spell a public name as users do: `Graph`, `losses.KTO`. Nothing is imported: the file of a subject lists or defines its names."""
    for subject in _SUBJECTS if name not in _NAMES else ():
        lines = Path(__file__).with_name(f"{subject}.py").read_text(encoding="utf-8").splitlines()
        if any(line.endswith(f" import {name} as {name}") or line.startswith(f"class {name}(") for line in lines):
            return f"{subject}.{name}"
    return name


def _by_old_spelling(name: str) -> Any:
    subject, _, found = spelling(name).rpartition(".")
    if not subject:
        raise AttributeError(f"module 'rlgraph' has no attribute '{name}'")
    warnings.warn(f"rlgraph.{name} is rlgraph.{subject}.{name} now; the old spelling ends with 0.4", DeprecationWarning, stacklevel=3)
    return vars(import_module(f"{__name__}.{subject}"))[found]


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
