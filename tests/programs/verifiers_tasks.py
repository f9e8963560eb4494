"""A task set of the real verifiers, run by the Python of its own environment: sums, scored by their answer and their length."""

from collections.abc import Iterable

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SumTask]:
        for number in range(5):
            yield SumTask(SumData(prompt=f"{number} + 1 =", system_prompt="Say a number.", answer=str(number + 1)), self.config.task)
