"""The lifecycle of a server: checked before the run, started or connected to, and restarted when it is lost."""

from __future__ import annotations

import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

from hone.base.extras import needed
from hone.base.http import Http, ServerError, ServerHangs, ServerLost
from hone.base.processes import Server
from hone.base.settings import UserError
from hone.recipe.sections.rollout import ServerConfig
from hone.rollout.engine import Event
from hone.rollout.servers.host import LOOPBACK, Host
from hone.rollout.servers.weight_transfer import ServedWeights

SHORT = 20.0  # seconds for a request that needs no computation: health, list of models
MODEL = "policy"  # the name under which a server that hone starts serves the model

#: Answers are large, since they hold a log-prob for each token; the server is the user's own.
server_at = partial(Http, most=1 << 30)


class ServerLifecycle(ABC):
    """Starts, updates and recovers one server; subclasses say how. `host`: where it is started, unless `url` is set."""

    name: ClassVar[str]
    module: ClassVar[str]  # the package that the server's interpreter must have
    reserved: ClassVar[int] = 0  # tokens of the context that the server uses for neither prompt nor answer

    def __init__(self, config: ServerConfig, folder: Path, event: Event, host: Host) -> None:
        self.config, self._host, self._event = config, host, event
        self._log = folder / f"{self.module}.log"
        self._process: Server | None = None
        self._http: Http | None = None
        self._served: ServedWeights | None = None  # the weights that the server was given last
        self._version = -1
        self._context: int | None = None
        self._model = MODEL
        self._restarts = 0
        self._closed = False
        #: Called after a restart, before any answer counts: the weights are checked again.
        self.on_restart: Callable[[], None] = lambda: None

    @abstractmethod
    def _command(self, served: ServedWeights, port: int) -> list[str]:
        """The command line of a server for these weights, listening on this port of the host's address."""

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """Variables for the server's process; those of the settings come over them."""

    @abstractmethod
    def _healthy(self, http: Http) -> bool:
        """Whether the server can generate. Raises ServerError if it does not answer as expected."""

    @abstractmethod
    def _update(self, new: ServedWeights, old: ServedWeights | None) -> None:
        """Replace the weights in place and drop caches of the old ones. `old` None: not known."""

    def _fits(self, new: ServedWeights) -> bool:
        """Whether the running server can load these weights in place."""
        return True

    @property
    def http(self) -> Http:
        assert self._http is not None, "sync first: it starts the server, or connects to it"
        return self._http

    def _check_possible(self) -> None:
        """Check the settings before anything is loaded or exported. Raises UserError."""
        if self.config.url is not None:
            try:
                self._healthy(server_at(self.config.url))
            except ServerError as error:
                message = f"rollout.{self.module}.url: no usable server at {self.config.url}: {error}"
                raise UserError(f"{message}; start one, or remove url to have hone start it") from error
            return
        self._check_port()
        python = self._python()
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.module!r}) is None)"
        try:
            missing, _ = self._host.output([python, "-c", probe], self._environment() | self.config.environment)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"rollout.{self.module}.python: {python} cannot be run ({error})") from error
        if missing:
            raise UserError(
                f"rollout.engine: {python} has no {self.module}; install it there ({needed(self.module)}"
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
        """Start a server with the weights in `_served`; one that is lost while starting counts as a restart."""
        while True:
            try:
                return self._launch()
            except (ServerLost, ServerHangs) as error:
                self._count(error, "it is restarted", "")

    def _launch(self) -> None:
        """Start a server on a port of the host's address, and wait until it is healthy."""
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
            except ServerError:  # still starting
                return False

        self._process.wait_until(healthy, self.config.start_timeout)
        self._read_model_info(http)
        self._http = http

    def _take_over(self, new: ServedWeights, before: ServedWeights | None) -> None:
        """Give the running server new weights; the first time, connect to the one at `url`."""
        if self._http is None:
            assert self.config.url is not None
            http = server_at(self.config.url)
            self._read_model_info(http)
            self._http = http
        self._update(new, before)

    def _read_model_info(self, http: Http) -> None:
        """Read the model's name and the length of its context."""
        models = http.get("/v1/models", seconds=SHORT, what="the list of models")
        first = models["data"][0]
        length = first.get("max_model_len")
        self._model, self._context = first["id"], None if length is None else length - self.reserved

    def _recover(self, error: ServerError, waiting: str) -> None:
        """Restart the server, or wait for the one at `url`; then give it the weights and have them checked.

        Repeats if the server is lost before it has the weights, until no restarts remain.
        """
        lost: ServerError | None = error
        while lost is not None:
            log = self._end(lost)
            how = "it is restarted" if self.config.url is None else f"waiting for it at {self.config.url}"
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
        """Stop the server. Returns the end of its log if it ended by itself."""
        if self._process is None:
            return ""
        log = ""
        if isinstance(error, ServerLost) and self._process.ended_within(1.0):
            log = f" It {self._process.how()}. Its log {self._log} ends with:\n{self._process.tail()}"
        self._process.stop()
        self._process = None
        return log

    def _count(self, error: ServerError, then: str, log: str) -> None:
        """Count a restart. Raises UserError if no restarts remain, and `error` if the engine was closed."""
        if self._closed:
            raise error
        if self._restarts >= self.config.restarts:
            raise UserError(
                f"{self.name}: {error}. It has been restarted {self._restarts} times already "
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
