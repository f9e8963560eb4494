"""How often a job may start again: as often as allowed without having got further than before."""

from dataclasses import dataclass

from rlgraph.errors import CheckpointError, RlgraphError, StalenessError

HOPELESS = (CheckpointError, StalenessError)  # errors that the same job meets again


@dataclass
class Restarts:
    """Counts failures in a row; a checkpoint that is newer than at the last failure makes them count anew."""

    allowed: int
    used: int = 0
    newest: int = 0

    def allows(self, error: Exception, newest: int) -> bool:
        """Count a failure, and return whether the job may start again after it."""
        if newest > self.newest:
            self.used, self.newest = 0, newest
        if isinstance(error, HOPELESS) or self.used >= self.allowed or hopeless(error):
            return False
        self.used += 1
        return True


def hopeless(error: Exception) -> bool:
    """Return whether a node failed before it ever ran: an engine that cannot be loaded will not be the next time either."""
    return isinstance(error, RlgraphError) and "failed before the first step" in str(error)
