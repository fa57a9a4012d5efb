"""What the engines behind servers share: weights are handed over in a folder, answers asked for prompt by prompt.

A server that crashes or hangs is started again with the same weights, and only the prompts that have no answers yet
are asked again: no group is lost, none comes twice. Every wait has a bound and a name. `hone.rollout.servers.vllm` and
`hone.rollout.servers.sglang` say what differs.
"""

from __future__ import annotations

import hashlib
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hone.base.http import Http, ServerError, ServerHangs, ServerLost, ServerRefused, may_pass
from hone.base.processes import Server
from hone.base.settings import UserError
from hone.recipe.sections.rollout import SamplingConfig, ServerConfig
from hone.rollout.engine import Event, Weights, check_room, check_tokens
from hone.rollout.servers.handover import Handed, WeightTransfer
from hone.rollout.servers.host import LOOPBACK, Host
from hone.types import Finish, IntArray, Turn

if TYPE_CHECKING:
    from hone.learn.policy import Policy

SHORT = 20.0  # seconds for a question whose answer needs no work: health, list of models
TRIES = 3  # how often one prompt is asked when the server is well but gives no whole answer to it
MODEL = "policy"  # the name under which a server that hone starts serves the model


#: Answers hold a log-prob of each token, so they are large, and the server is the user's own.
server_at = partial(Http, most=1 << 30)


class Aborted(ServerError):
    """The server gave up an answer in the middle."""


class StaleAnswer(ServerError):
    """An answer, or a part of it, is not from the weights that the server was given last."""


class ServerEngine(ABC):
    """Implements `hone.rollout.engine.Engine`; also what `hone.rollout.identity` needs.

    `folder`: where the log is written, and weights are handed over unless the settings name another folder. `host`:
    where the server is started, unless it runs already. `vocabulary`: how many token ids the model has, if known.
    """

    name: ClassVar[str]
    module: ClassVar[str]  # what the server's interpreter has to have installed
    reserved: ClassVar[int] = 0  # tokens of the context that it fills neither with a prompt nor with its answer

    def __init__(
        self,
        config: ServerConfig,
        stop_ids: Sequence[int],
        *,
        dtype: str,
        max_sequences: int,
        folder: Path,
        event: Event,
        host: Host | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.config, self._host = config, Host() if host is None else host
        self._stops, self._dtype, self._max_sequences = [int(i) for i in stop_ids], dtype, max_sequences
        self._log = folder / f"{self.module}.log"
        weights = Path(config.weights_folder).expanduser() if config.weights_folder else folder / "serving"
        self._handover = WeightTransfer(weights, adapter=config.serves_adapter)
        self._event = event
        self._process: Server | None = None
        self._http: Http | None = None
        self._served: Handed | None = None  # the weights that the server was given last
        self._version = -1
        self._context: int | None = None
        self._vocabulary = vocabulary
        self._generating = threading.Lock()  # weights must not change under an answer
        self._model = MODEL
        self._restarts = 0
        self._closed = False
        #: Called after a restart, before any answer counts: the weights are checked again.
        self.on_restart: Callable[[], None] = lambda: None
        self._check_possible()

    # --- Engine -------------------------------------------------------------------------------

    def sync(self, policy: Policy, version: int) -> None:
        """Hand over the weights; the first time, start the server with them or connect to the one at `url`.

        Raises RuntimeError while `generate` runs in another thread: the end of an answer would be of other weights than
        its beginning.
        """
        if not self._generating.acquire(blocking=False):
            raise RuntimeError("sync while answers are being generated: wait for generate to return")
        try:
            new = self._handover.export(policy, version)
            before, self._served, self._version = self._served, new, version
            if self.config.url is None and (self._http is None or not self._fits(new)):
                self._start()
            else:
                try:
                    self._take_over(new, before)
                except (ServerLost, ServerHangs) as error:
                    self._recover(error, "its new weights")
            if before is not None:
                self._handover.drop(before, new)
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
        first: int = 0,
    ) -> list[list[Turn]]:
        """See `hone.rollout.engine.Engine`.

        Each prompt has a seed of its own, but the arithmetic of a server depends on what else is in its batch: the
        same call need not give the same tokens. Raises UserError when restarts are used up, or an answer does not come.
        """
        if samples < 1:
            raise ValueError(f"samples is {samples}: ask for at least one completion per prompt")
        check_room([len(prompt) for prompt in prompts], sampling.max_tokens, self._context)
        check_tokens(prompts, self._vocabulary)
        with self._generating:
            return self._generate(prompts, sampling, samples, seed, progress, first)

    def _generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        samples: int,
        seed: int,
        progress: Callable[[int, int], None] | None,
        first: int,
    ) -> list[list[Turn]]:
        done: dict[int, list[Turn]] = {}
        tries: Counter[int] = Counter()

        def ask(i: int) -> list[Turn]:
            return self._turns(prompts[i], sampling, samples, prompt_seed(seed, first + i))

        while len(done) < len(prompts):
            waiting = [i for i in range(len(prompts)) if i not in done]
            lost = self._round(ask, waiting, done, tries, progress, len(prompts) * samples)
            if lost is not None:
                missing = len(prompts) - len(done)
                self._recover(lost, f"{missing} of {len(prompts)} prompts")
        return [done[i] for i in range(len(prompts))]

    def close(self) -> None:
        """Ends what is under way, in other threads too, and the server if hone started it."""
        self._closed = True
        if self._http is not None:
            self._http.hang_up()
        if self._process is not None:
            self._process.stop()
            self._process = None
        if self._served is not None:
            self._handover.drop(self._served)  # a copy; it may lie in memory
        self._http = self._served = None

    # --- for hone.rollout.identity ------------------------------------------------------------

    def probe(self, sequences: Sequence[IntArray]) -> tuple[list[Turn], Weights | None]:
        """`score` and `weights`, both of one life of the server: when it is lost meanwhile, both are asked again.

        Raises UserError when restarts are used up, or no whole answer comes.
        """
        check_tokens(sequences, self._vocabulary)
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
        """What the server says of the tensors that it holds, where it can say so."""
        return None

    # --- what differs -------------------------------------------------------------------------

    @abstractmethod
    def _command(self, served: Handed, port: int) -> list[str]:
        """The command line of a server for these weights, which listens at this port of the host's address."""

    @abstractmethod
    def _environment(self) -> dict[str, str]: ...

    @abstractmethod
    def _healthy(self, http: Http) -> bool:
        """Whether the server can generate. Raises ServerError if it does not answer as expected."""

    @abstractmethod
    def _update(self, new: Handed, old: Handed | None) -> None:
        """Replace the weights in place; what was cached of the old ones is dropped. `old` None: it is not known."""

    def _fits(self, new: Handed) -> bool:
        """Whether the server that was started can take these weights over in place."""
        return True

    @abstractmethod
    def _answers(
        self, prompt: list[int], sampling: SamplingConfig, samples: int, seed: int
    ) -> list[tuple[list[int], list[float], Finish]]:
        """Token ids, log-probs at sampling settings, and finish of each sample; Aborted if one has none."""

    @abstractmethod
    def _score(self, ids: list[int]) -> list[float]: ...

    # --- asking -------------------------------------------------------------------------------

    @property
    def http(self) -> Http:
        assert self._http is not None, "sync first: it starts the server, or connects to it"
        return self._http

    def _round(
        self,
        ask: Callable[[int], list[Turn]],
        waiting: Sequence[int],
        done: dict[int, list[Turn]],
        tries: Counter[int],
        progress: Callable[[int, int], None] | None,
        total: int,
    ) -> ServerError | None:
        """Ask for what is waiting; answers go into `done`. Returns why the server has to be started again, if so."""
        lost: ServerError | None = None
        stop = threading.Event()  # what has not been sent yet need not be

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
                    if lost is None:  # the others wait for the same server: they need not wait for their time-outs
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
        """Raises UserError if it is the request's fault, or if it happened too often."""
        if isinstance(error, ServerRefused) and not may_pass(error):
            raise UserError(f"{self.name} refuses prompt {prompt}: {error.message} (status {error.status})") from error
        tries[prompt] += 1
        if tries[prompt] >= TRIES:
            raise UserError(
                f"{self.name} gave no whole answer to prompt {prompt} in {TRIES} tries; the last time: {error}. If its "
                f"memory for keys and values is too small, lower rollout.max_sequences. Log: {self._log}"
            ) from error
        self._event("server_retry", f"{self.name}, prompt {prompt}: {error}; it is asked again")
        self.http.pause(tries[prompt])

    def _turns(self, prompt: IntArray, sampling: SamplingConfig, samples: int, seed: int) -> list[Turn]:
        found = self._answers([int(i) for i in prompt], sampling, samples, seed)
        if len(found) != samples:
            raise Aborted(f"{len(found)} answers instead of {samples}")
        return [
            Turn(prompt, np.asarray(ids, np.int64), np.asarray(logprobs, np.float32), finish, self._version)
            for ids, logprobs, finish in found
        ]

    # --- the server ---------------------------------------------------------------------------

    def _check_possible(self) -> None:
        """Before anything is loaded or exported. Raises UserError."""
        if self.config.url is not None:
            try:
                self._healthy(server_at(self.config.url))
            except ServerError as error:
                message = f"rollout.{self.module}.url: no server that can be used at {self.config.url}: {error}"
                raise UserError(f"{message}; start one, or remove url to have hone start it") from error
            return
        self._check_port()
        python = self._python()
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.module!r}) is None)"
        try:
            missing, _ = self._host.output([python, "-c", look], self._environment() | self.config.environment)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"rollout.{self.module}.python: {python} cannot be run ({error})") from error
        if missing:
            raise UserError(
                f"rollout.engine: {python} has no {self.module}; install it there (pip install 'hone-rl[{self.module}]'"
                f"), or name the interpreter that has it in rollout.{self.module}.python"
            )
        if self.config.weights_folder and not self._host.sees(Path(self.config.weights_folder).expanduser()):
            raise UserError(
                f"rollout.{self.module}.weights_folder: {self._host.address}, where the server runs, does not see "
                f"{self.config.weights_folder}; name a folder on storage that both share, or remove it"
            )

    def _python(self) -> str:
        return self.config.python or self._host.python

    def _check_port(self) -> None:
        if self.config.port and not self._host.port_is_free(self.config.port):
            raise UserError(
                f"rollout.{self.module}.port: {self.config.port} is taken by another program; give a free one, or 0 to "
                "have one chosen"
            )

    def _start(self) -> None:
        """A new server with the weights in `_served`; one that is lost while it comes up counts as a restart."""
        while True:
            try:
                return self._launch()
            except (ServerLost, ServerHangs) as error:
                self._count(error, "it is started again", "")

    def _launch(self) -> None:
        """On a port of loopback, or of a machine of the cluster."""
        assert self._served is not None
        if self._process is not None and self._process.running:
            self._process.stop()
        self._host.ready(self.config.start_timeout)
        if self._host.stop_leftover(self._log):
            self._event("server_leftover", f"stopped the {self.name} server that an earlier run left behind")
        self._check_port()
        port = self.config.port or self._host.free_port()
        http = server_at(f"http://{self._host.address}:{port}")
        if self._host.address != LOOPBACK:
            self._event("server_listens", f"{self.name} at {http.url}: open to every machine that reaches this address")
        command = [*self._command(self._served, port), *self.config.arguments]
        environment = self._environment() | self.config.environment
        self._process = self._host.start(command, environment, self._log, f"the {self.name} server")

        def healthy() -> bool:
            try:
                return self._healthy(http)
            except ServerError:  # it is only just starting
                return False

        self._process.wait_until(healthy, self.config.start_timeout)
        self._look_around(http)
        self._http = http

    def _take_over(self, new: Handed, before: Handed | None) -> None:
        """New weights for the server that runs; the first time, connect to the one at `url`."""
        if self._http is None:
            assert self.config.url is not None
            http = server_at(self.config.url)
            self._look_around(http)
            self._http = http
        self._update(new, before)

    def _look_around(self, http: Http) -> None:
        """The name of the model and the length of its context."""
        models = http.get("/v1/models", seconds=SHORT, what="the list of models")
        first = models["data"][0]
        length = first.get("max_model_len")
        self._model, self._context = first["id"], None if length is None else length - self.reserved

    def _recover(self, error: ServerError, waiting: str) -> None:
        """Start the server again, or wait for the one at `url`; then give it the weights and have them checked.

        Again, while it is lost once more before it has them and restarts are left.
        """
        lost: ServerError | None = error
        while lost is not None:
            log = self._end(lost)
            how = "it is started again" if self.config.url is None else f"waiting for it at {self.config.url}"
            self._count(lost, f"{how} with the weights of version {self._version}, then asked again for {waiting}", log)
            lost = None
            if self.config.url is None:
                self._start()
                continue
            self._wait_for_return(self.config.url)
            assert self._served is not None
            try:
                self._take_over(self._served, None)
            except (ServerLost, ServerHangs) as again:
                lost = again
        self.on_restart()

    def _end(self, error: ServerError) -> str:
        """Stop what is left of the server. Returns the end of its log, if it has ended by itself."""
        if self._process is None:
            return ""
        log = ""
        if isinstance(error, ServerLost) and self._process.ended_within(1.0):
            log = f" It {self._process.how()}. Its log {self._log} ends with:\n{self._process.tail()}"
        self._process.stop()
        self._process = None
        return log

    def _count(self, error: ServerError, then: str, log: str) -> None:
        """One more restart. Raises UserError if that is one too many, `error` if nobody wants the server any more."""
        if self._closed:
            raise error
        if self._restarts >= self.config.restarts:
            raise UserError(
                f"{self.name}: {error}. It has been started again {self._restarts} times already "
                f"(rollout.{self.module}.restarts).{log}"
            )
        self._restarts += 1
        self._event(
            "server_restart", f"{self.name}: {error}; {then} (restart {self._restarts} of {self.config.restarts}).{log}"
        )

    def _wait_for_return(self, url: str) -> None:
        deadline = time.monotonic() + self.config.start_timeout
        while True:
            try:
                if self._healthy(server_at(url)):
                    return
                reason = "not ready"
            except ServerError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise UserError(f"{self.name}: no server at {url} within {self.config.start_timeout:g} s: {reason}")
            time.sleep(1.0)


def prompt_seed(seed: int, prompt: int) -> int:
    """A seed of 62 bits for each (seed, prompt); servers count up from it for the samples of a prompt."""
    digest = hashlib.blake2b(f"{seed}/{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def ordinary(sampling: SamplingConfig) -> dict[str, Any]:
    """The settings that every server calls the same."""
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
