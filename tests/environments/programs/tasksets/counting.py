"""A taskset of verifiers: write a letter often."""

import verifiers.v1 as vf


class CountData(vf.TaskData):
    letter: str


class CountTask(vf.Task[CountData]):
    @vf.reward
    async def letters(self, trace) -> float:
        return float(trace.last_reply.count(self.data.letter))

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class CountTaskset(vf.Taskset[CountTask, vf.TasksetConfig]):
    def load(self):
        for letter in "abcdefghijkl":
            yield CountTask(CountData(prompt=f"Write many {letter}.", letter=letter), self.config.task)


__all__ = ["CountTaskset"]
