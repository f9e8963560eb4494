"""Every error rlgraph raises. Each message says where, what was found, the rule and the fix.

All of them cross process boundaries, so each carries one string and nothing else.
"""


class RlgraphError(Exception):
    """Base of all errors that rlgraph raises on purpose."""


class GraphError(RlgraphError):
    """A graph breaks a rule; raised while it is declared."""


class PlanError(RlgraphError):
    """A sound graph does not fit the cluster it is compiled for."""


class PlanWarning(UserWarning):
    """What a plan or a comparison of plans rests on is not known; the plan is made all the same, and says it too."""


class ConfigError(RlgraphError):
    """A configuration key or value is unknown, missing or of the wrong type."""


class DataError(RlgraphError):
    """A data set, a model folder or a prompt cannot be used as it is."""


class ChannelError(RlgraphError):
    """Base of the three ways in which a channel stops a worker."""


class ChannelClosed(ChannelError):
    """The other end finished and closed the channel."""


class ChannelBroken(ChannelError):
    """The other end failed or died."""


class ChannelTimeout(ChannelError):
    """The other end was silent for longer than the deadline."""


class StalenessError(RlgraphError):
    """A batch is older than the bound of its graph: a defect of rlgraph, never of its user."""


class CertificateError(RlgraphError):
    """A run did what its plan's certificate rules out: a defect of rlgraph, never of its user."""


class NodeError(RlgraphError):
    """A node raised; the message names node, step and worker and holds the original traceback."""


class GuardError(RlgraphError):
    """An update was kept from learning what its guards refuse; the weights are those of before."""


class WorkerDied(RlgraphError):
    """A worker process ended without a word."""


class CheckpointError(RlgraphError):
    """A checkpoint cannot be written, or is not one that this run can go on from."""
