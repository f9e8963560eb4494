"""What runs beside verifiers, in its own environment of packages: it lists the tasks of a task set, and scores an answer."""

import functools
import itertools

from child import loaded  # the program that imports this file
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.utils.generic import concrete_type


@functools.cache
def tasks(taskset, most, config):
    """Make the tasks of a task set."""
    where, _, what = taskset.rpartition(":")
    made = vars(loaded(where))[what]
    kind = concrete_type(made, TasksetConfig) or TasksetConfig
    return list(itertools.islice(made(kind(**dict(config))), most))


def messages(data):
    """The conversation with which a task begins, as plain values."""
    prompt = data.prompt
    found = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [m.model_dump(exclude_none=True) for m in prompt or ()]
    return ([{"role": "system", "content": data.system_prompt}] if data.system_prompt else []) + found


def rows(taskset, most, config):
    """List the tasks as rows. Raises ValueError for tasks that this adapter cannot play."""
    listed = []
    for number, task in enumerate(tasks(taskset, most, tuple(sorted(config.items())))):
        if task.NEEDS_CONTAINER or type(task).toolsets(task.config):
            raise ValueError(f"task {number} of {taskset} needs a container or tools")
        listed.append({"prompt": messages(task.data), "task": number})
    return listed


class ScoredTask:
    """A task, and the score of one answer."""

    def __init__(self, task, taskset, most, config):
        self.task = tasks(taskset, most, tuple(sorted(config.items())))[task]

    async def reset(self):
        return messages(self.task.data)

    async def step(self, said):
        given = [{"sampled": False, "message": message} for message in messages(self.task.data)]
        given.append({"sampled": True, "message": {k: said[k] for k in ("role", "content", "reasoning_content") if k in said}})
        nodes = [MessageNode(parent=place - 1 if place else None, **node) for place, node in enumerate(given)]
        told = TraceTask(type=type(self.task).__name__, data=self.task.data)
        trace = Trace(task=told, agent=AgentInfo(config=AgentConfig()), nodes=nodes)
        await self.task.score(trace)
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return {"reward": float(trace.reward), "done": True, "info": metrics}

    async def close(self):
        """Do nothing: it holds no resources."""
