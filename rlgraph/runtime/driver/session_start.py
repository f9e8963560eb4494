"""The start of a plan's workers: each in a process, joined to the driver and to one another; every wait has a deadline and a name."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.status import Status

from rlgraph.channels.host.connection import bound, close_listener, listen
from rlgraph.errors import ChannelTimeout
from rlgraph.runtime import messages
from rlgraph.runtime.driver.hosts import Hosts
from rlgraph.runtime.driver.ray_dispatch import Dispatch
from rlgraph.runtime.driver.worker_group import WorkerGroup
from rlgraph.runtime.worker.spec import WorkerSpec


def start_workers(
    dispatch: Dispatch, group: WorkerGroup, specs: Sequence[WorkerSpec], actors: list[Any], hosts: Hosts, ids: Sequence[str]
) -> None:
    """Start a worker for each spec and wait until all are ready; `actors` gets each as it is made, on the hosts of `ids`.

    Raises WorkerDied or NodeError for a worker that cannot start, ChannelTimeout for one that has not started by the deadline.
    """
    wanted, end = f"{hosts.addresses[hosts.driver]}:0" if hosts.addresses else f"{hosts.folder}/driver", time.monotonic() + group.start_s
    listener = listen("driver", wanted, backlog=len(specs) + 8)
    address = bound(listener) if hosts.addresses else wanted
    try:
        console, began_s = Console(stderr=True, highlight=False, markup=False), time.monotonic()
        if not console.is_terminal:  # no spinner is shown there
            console.print(f"starting workers: {', '.join(spec.worker.name for spec in specs)}", soft_wrap=True)
        with Status("", console=console) as status:

            def look(missing: list[str]) -> None:
                status.update(f"starting workers, waiting for {', '.join(missing)}")
                dispatch.check()
                unseen = [name for name in missing if name not in group.pids]
                if unseen and time.monotonic() > end:
                    raise ChannelTimeout(
                        f"workers {unseen} have not started within {group.start_s:g} s: their processes do not come up, or Ray found no "
                        "place for them (see `ray status`)"
                    )

            group.welcome(listener, specs[0].authkey, hosts, encrypt=specs[0].encrypt)
            dispatch.announce(specs)
            for spec in specs:
                actors.append(dispatch.create(spec, address, ids[spec.worker.host] if ids else ""))
            group.tell(messages.Join(group.until_open(look)))
            group.until_ready(look)
        if not console.is_terminal:
            console.print(f"all workers are ready after {time.monotonic() - began_s:.0f} s")
    finally:
        close_listener(listener, address)
