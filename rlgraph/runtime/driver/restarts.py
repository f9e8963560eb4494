"""Limit how often a job starts again without making progress in between."""

from dataclasses import dataclass

from rlgraph.errors import CheckpointError, NodeError, StalenessError

HOPELESS = (CheckpointError, StalenessError)  # errors that the same job meets again


@dataclass
class Restarts:
    """Counts failures in a row; a checkpoint that is newer than at the last failure makes them count anew."""

    allowed: int
    used: int = 0
    newest: int = 0

    def allows(self, error: Exception, newest: int, *, ready: bool) -> bool:
        """Count a failure and tell whether the job may start again; `ready` says that all workers were ready when it failed."""
        if newest > self.newest:
            self.used, self.newest = 0, newest
        unloadable = isinstance(error, NodeError) and not ready  # an engine that failed to load will fail again
        if isinstance(error, HOPELESS) or unloadable or self.used >= self.allowed:
            return False
        self.used += 1
        return True
