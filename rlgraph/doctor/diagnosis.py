"""`rlgraph.doctor`: check what this machine can run."""

from rlgraph.doctor.check import Diagnosis
from rlgraph.doctor.devices import device_checks
from rlgraph.doctor.system import system_checks
from rlgraph.doctor.versions import version_checks


def doctor() -> Diagnosis:
    """Check this machine: versions, GPUs and their links, dtypes, memory, limits, the sandbox, Ray's port. Nothing is changed.

        print(rg.doctor())

    It takes a few seconds: it imports torch, and starts three empty runs of the sandbox.

    >>> import rlgraph as rg
    >>> [check.state for check in rg.doctor().checks if check.name == "Python"]
    ['ok']
    """
    return Diagnosis((*version_checks(), *device_checks(), *system_checks()))
