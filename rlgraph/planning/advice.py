"""What a plan's user could change, in words, read off the critical cycle and the load of the pools."""

from rlgraph.planning.plan import Plan

IDLE = 0.75  # a pool that works less than this waits noticeably


def advise(plan: Plan) -> tuple[str, ...]:
    """Return advice, most important first; empty where nothing stands out."""
    found = []
    period = plan.prediction.period_s
    events = {event.name: event for event in plan.schedule.events}
    pools = {events[name].pool for name in plan.prediction.critical}
    waiting = [pool for pool in plan.pools if pool.busy < IDLE and any(node.pool == pool.name for node in plan.nodes)]
    busiest = max(plan.pools, key=lambda pool: pool.busy, default=None)
    in_loop = any(event.kind != "fire" for event in (events[name] for name in plan.prediction.critical))
    if in_loop and len(pools - {None}) > 1:
        depths = ", ".join(f"{loop.name} has depth {loop.depth}" for loop in plan.loops)
        found.append(f"the weights' loop sets the step ({depths}): a deeper one overlaps generation and training, at more staleness")
    elif busiest is not None and waiting and period > 0:
        idle = " and ".join(f"'{pool.name}' ({pool.busy:.0%} busy)" for pool in waiting if pool is not busiest)
        if idle:
            found.append(f"pool '{busiest.name}' sets the step while {idle} waits: move share to '{busiest.name}'")
    for loop in plan.loops:
        if not loop.hidden and loop.buffers == 1 and loop.depth > 0:
            found.append(f"moving '{loop.name}' lengthens the step: buffers=2 receives them while the generator decodes")
    used = sum(pool.cpus for pool in plan.pools if pool.device == "cpu" and any(node.pool == pool.name for node in plan.nodes))
    if not plan.cluster.gpus and used > plan.cluster.cpus:
        found.append(f"the pools take {used} cores, but the cluster has {plan.cluster.cpus}: they will slow one another")
    return tuple(found)
