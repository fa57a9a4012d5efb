"""The base of engines behind servers: weights are transferred in a folder, prompts are sent one request each.

A server that crashes or hangs is restarted with the same weights, and only the prompts without answers are sent again:
no group is lost or duplicated. Every wait has a bound and a name. The subclasses are in `hone.rollout.servers.vllm` and
`hone.rollout.servers.sglang`.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hone.base import streams
from hone.base.http import ServerError, ServerHangs, ServerLost, ServerRefused, may_pass
from hone.base.settings import UserError
from hone.recipe.sections.rollout import SamplingConfig, ServerConfig
from hone.rollout.engine import Event, ModelTraits, Weights, check_room, check_tokens
from hone.rollout.servers.host import Host
from hone.rollout.servers.lifecycle import ServerLifecycle
from hone.rollout.servers.weight_transfer import WeightTransfer
from hone.types import Finish, IntArray, Turn

if TYPE_CHECKING:
    from hone.learn.policy import Policy

TRIES = 3  # attempts at one prompt while the server is healthy but returns no complete answer


class Aborted(ServerError):
    """The server aborted an answer before its end."""


class StaleAnswer(ServerError):
    """An answer, or part of it, does not come from the newest weights."""


class ServerEngine(ServerLifecycle):
    """Implements `hone.rollout.engine.Engine` and `hone.rollout.identity.Scorer`.

    `folder`: for the log, and for weights unless the settings name another folder. `host`: where the server is
    started, unless `url` is set; by default this machine.
    """

    def __init__(
        self,
        config: ServerConfig,
        traits: ModelTraits,
        max_sequences: int,
        folder: Path,
        event: Event,
        host: Host | None = None,
    ) -> None:
        super().__init__(config, folder, event, Host() if host is None else host)
        self._traits, self._max_sequences = traits, max_sequences
        weights = Path(config.weights_folder).expanduser() if config.weights_folder else folder / "serving"
        self._transfer = WeightTransfer(weights, adapter=config.serves_adapter)
        self._generating = threading.Lock()  # weights must not change under an answer
        self._check_possible()

    # --- Engine -------------------------------------------------------------------------------

    def sync(self, policy: Policy, version: int) -> None:
        """Transfer the weights; the first time, start the server with them or connect to the one at `url`.

        Raises RuntimeError while `generate` runs in another thread: answers would mix two versions of the weights.
        """
        if not self._generating.acquire(blocking=False):
            raise RuntimeError("sync while answers are being generated: wait for generate to return")
        try:
            new = self._transfer.export(policy, version)
            before, self._served, self._version = self._served, new, version
            if self.config.url is None and (self._http is None or not self._fits(new)):
                self._start()
            else:
                try:
                    self._take_over(new, before)
                except (ServerLost, ServerHangs) as error:
                    self._recover(error, "its new weights")
            if before is not None:
                self._transfer.drop(before, new)
        finally:
            self._generating.release()

    def generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        stream_ids: Sequence[int] | None = None,
    ) -> list[list[Turn]]:
        """See `hone.rollout.engine.Engine`.

        Each prompt has its own seed, but a server's arithmetic depends on the rest of its batch: the same call
        need not return the same tokens. Raises UserError if no restarts remain, or an answer fails repeatedly.
        """
        if samples < 1:
            raise ValueError(f"samples is {samples}: ask for at least one completion per prompt")
        check_room([len(prompt) for prompt in prompts], sampling.max_tokens, self._context)
        check_tokens(prompts, self._traits.vocabulary)
        with self._generating:
            numbers = range(len(prompts)) if stream_ids is None else stream_ids
            seeds = [streams.server_prompt(seed, number) for number in numbers]
            return self._generate(prompts, sampling, samples, seeds, progress)

    @property
    def context(self) -> int | None:
        return self._context

    def _generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        samples: int,
        seeds: Sequence[int],
        progress: Callable[[int, int], None] | None,
    ) -> list[list[Turn]]:
        done: dict[int, list[Turn]] = {}
        tries: Counter[int] = Counter()

        def ask(i: int) -> list[Turn]:
            return self._turns(prompts[i], sampling, samples, seeds[i])

        while len(done) < len(prompts):
            waiting = [i for i in range(len(prompts)) if i not in done]
            lost = self._round(ask, waiting, done, tries, progress, len(prompts) * samples)
            if lost is not None:
                missing = len(prompts) - len(done)
                self._recover(lost, f"{missing} of {len(prompts)} prompts")
        return [done[i] for i in range(len(prompts))]

    def close(self) -> None:
        """End running requests, in other threads too, and the server if hone started it."""
        self._closed = True
        if self._http is not None:
            self._http.hang_up()
        if self._process is not None:
            self._process.stop()
            self._process = None
        if self._served is not None:
            self._transfer.drop(self._served)  # a copy, perhaps in memory (tmpfs)
        self._http = self._served = None

    # --- for hone.rollout.identity ------------------------------------------------------------

    def probe(self, sequences: Sequence[IntArray]) -> tuple[list[Turn], Weights | None]:
        """The results of `score` and `weights` from one server process: if it is lost between them, both are requested
        again.

        Raises UserError if no restarts remain, or no complete answer comes.
        """
        check_tokens(sequences, self._traits.vocabulary)
        tries: Counter[int] = Counter()
        while True:
            try:
                return self.score(sequences), self.weights()
            except (ServerLost, ServerHangs) as error:
                self._recover(error, "the check of its weights")
            except Aborted as error:
                self._try_again(0, error, tries)

    def score(self, sequences: Sequence[IntArray]) -> list[Turn]:
        """The served model's log-probs (temperature 1) of each token of fixed sequences after the first."""
        turns = []
        for ids in sequences:
            logprobs = np.asarray(self._score(ids.tolist()), np.float32)
            turns.append(Turn(ids[:1], ids[1:], logprobs, "length", self._version))
        return turns

    def weights(self) -> Weights | None:
        """The digests of the server's tensors; None if it cannot compute them."""
        return None

    # --- of each server -----------------------------------------------------------------------

    @abstractmethod
    def _answers(
        self, prompt: list[int], sampling: SamplingConfig, samples: int, seed: int
    ) -> list[tuple[list[int], list[float], Finish]]:
        """Token ids, log-probs under the sampling settings, and finish of each sample. Raises Aborted."""

    @abstractmethod
    def _score(self, ids: list[int]) -> list[float]:
        """Log-probs [L - 1] at temperature 1 of all tokens but the first, by the newest weights."""

    # --- requests -----------------------------------------------------------------------------

    def _round(
        self,
        ask: Callable[[int], list[Turn]],
        waiting: Sequence[int],
        done: dict[int, list[Turn]],
        tries: Counter[int],
        progress: Callable[[int, int], None] | None,
        total: int,
    ) -> ServerError | None:
        """Send the waiting prompts; answers go into `done`. Returns the error if the server must be restarted."""
        lost: ServerError | None = None
        stop = threading.Event()  # send no further prompts

        def send(i: int) -> list[Turn]:
            if stop.is_set():
                raise ServerLost("not sent: the server was lost before")
            return ask(i)

        pool = ThreadPoolExecutor(self.config.requests, f"{self.module} requests")
        try:
            futures: dict[Future[list[Turn]], int] = {pool.submit(send, i): i for i in waiting}
            for future in as_completed(futures):
                try:
                    done[futures[future]] = future.result()
                except (ServerLost, ServerHangs) as error:
                    if lost is None:  # other requests to this server need not wait for their time-outs
                        lost = error
                        stop.set()
                        self.http.hang_up()
                except StaleAnswer as error:
                    prompt = futures[future]
                    raise UserError(f"{self.name} answered prompt {prompt} with old weights: {error}") from error
                except (ServerRefused, Aborted) as error:
                    self._try_again(futures[future], error, tries)
                else:
                    if progress is not None:
                        progress(sum(map(len, done.values())), total)
        except BaseException:
            stop.set()
            self.http.hang_up()
            raise
        finally:
            pool.shutdown()
        return lost

    def _try_again(self, prompt: int, error: ServerRefused | Aborted, tries: Counter[int]) -> None:
        """Record a failed attempt. Raises UserError if the request itself is at fault, or has failed too often."""
        if isinstance(error, ServerRefused) and not may_pass(error):
            raise UserError(f"{self.name} refuses prompt {prompt}: {error.message} (status {error.status})") from error
        tries[prompt] += 1
        if tries[prompt] >= TRIES:
            raise UserError(
                f"{self.name} gave no complete answer to prompt {prompt} in {TRIES} tries; the last time: {error}. If "
                f"its "
                f"memory for keys and values is too small, lower rollout.max_sequences. Log: {self._log}"
            ) from error
        self._event("server_retry", f"{self.name}, prompt {prompt}: {error}; retrying")
        self.http.pause(tries[prompt])

    def _turns(self, prompt: IntArray, sampling: SamplingConfig, samples: int, seed: int) -> list[Turn]:
        answers = self._answers([int(i) for i in prompt], sampling, samples, seed)
        if len(answers) != samples:
            raise Aborted(f"{len(answers)} answers instead of {samples}")
        return [
            Turn(prompt, np.asarray(ids, np.int64), np.asarray(logprobs, np.float32), finish, self._version)
            for ids, logprobs, finish in answers
        ]


def ordinary(sampling: SamplingConfig) -> dict[str, Any]:
    """The settings with the same name on every server."""
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
