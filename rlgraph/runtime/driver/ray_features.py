"""Check before anything starts that this version of Ray has the features that rlgraph uses."""

import importlib.util
from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter

from rlgraph.errors import PlanError
from rlgraph.plan.channels import lies_in_ray
from rlgraph.plan.plan import Plan

TESTED = "2.60.0"  # the newest version that was tested
INSTALL = f"pip install 'ray=={TESTED}'"

# By module and name. Ray's public interface is not listed, nor are features that rlgraph can do without.
START = (
    "ray._private.node:Node.get_session_dir_path",
    "ray._private.services:ConsolePopen",
    "ray._private.services:get_node",
    "ray._private.state:GlobalState.get_draining_nodes",
    "ray._private.utils:detect_fate_sharing_support_linux",
    "ray._private.utils:set_sigterm_handler",
    "ray._private.worker:_global_node",
)
COMPILED_GRAPHS = ("ray.dag:InputNode", "ray.dag:MultiOutputNode.experimental_compile")
DIRECT_TRANSPORT = ("ray.experimental:RDTManager",)  # rlgraph does not use it
JOBS = ("ray.dashboard.optional_deps:aiohttp",)  # of Ray's extra `default`
TRANSPORT = ("rlgraph.channels.host.ray_channel:RayWriter",)  # it imports the channels of Compiled Graphs


def version() -> str:
    """Read the version of Ray; empty if there is none."""
    return str(import_module("ray").__version__) if importlib.util.find_spec("ray") else ""


def find_missing(names: Sequence[str]) -> list[str]:
    """List the names that cannot be imported.

    >>> find_missing(["os:path.join", "os:no_such", "no_such_module:name"])
    ['os.no_such', 'no_such_module.name']
    """
    return [name.replace(":", ".") for name in names if not _is_there(*name.split(":"))]


def _is_there(module: str, name: str) -> bool:
    try:
        attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


def has_compiled_graphs() -> bool:
    """Whether this Ray has Compiled Graphs, which a later version may drop."""
    return not find_missing(COMPILED_GRAPHS)


def check_ray(plan: Plan) -> None:
    """Raise PlanError if Ray lacks features that a plan's launch needs."""
    if not version():
        raise PlanError("launch(): Ray is not installed; `pip install ray`, or launch(dispatch='processes'), which runs without it")
    if missing := find_missing(START):
        raise PlanError(
            f"launch(): Ray {version()} lacks {', '.join(missing)}, with which rlgraph starts it; {INSTALL}, the newest version that was "
            "tested, or launch(dispatch='processes'), which runs without Ray"
        )
    if lies_in_ray(plan) and find_missing(TRANSPORT):
        raise PlanError(
            f"launch(transport='ray'): Ray {version()} lacks the channels of Compiled Graphs; leave transport= out, or {INSTALL}"
        )
