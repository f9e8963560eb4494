"""The start of a plan's workers: each in a process, joined to the driver and to one another; every wait has a deadline and a name."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.status import Status

from rlgraph.channels.address import close_listener, listen
from rlgraph.errors import ChannelTimeout
from rlgraph.runtime import messages
from rlgraph.runtime.crew import Crew
from rlgraph.runtime.dispatch import Dispatch
from rlgraph.runtime.hosts import Host
from rlgraph.runtime.tasks import WorkerSetup


def muster(dispatch: Dispatch, crew: Crew, setups: Sequence[WorkerSetup], actors: list[Any], host: Host) -> None:
    """Start a worker for each setup and return when all are ready; `actors` gets them as they are made.

    Raises WorkerDied or NodeError for one that cannot start, ChannelTimeout for one that does not within the deadline.
    """
    address, end = f"{host.folder}/driver", time.monotonic() + crew.start_s
    listener = listen("driver", address, backlog=len(setups) + 8)
    try:
        with Status("", console=Console(stderr=True)) as status:

            def look(missing: list[str]) -> None:
                status.update(f"starting workers, waiting for {', '.join(missing)}")
                dispatch.check()
                unseen = [name for name in missing if name not in crew.pids]
                if unseen and time.monotonic() > end:
                    raise ChannelTimeout(
                        f"workers {unseen} have not started within {crew.start_s:g} s: their processes do not come up, or Ray found no "
                        "place for them (see `ray status`)"
                    )

            crew.welcome(listener, setups[0].authkey, host)
            for setup in setups:
                actors.append(dispatch.create(setup, address))
            crew.tell(messages.Join(crew.until_open(look)))
            crew.until_ready(look)
    finally:
        close_listener(listener, address)
