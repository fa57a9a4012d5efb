"""Reads Harbor task folders (https://www.harborframework.com/docs/tasks).

    instruction.md       what the model is asked, instead of the problem's prompt
    environment/         the Dockerfile of the task's image and its files; without a Dockerfile, the working folder
    tests/test.sh        run after the episode; writes /logs/verifier/reward.txt or reward.json
    task.toml            [environment] docker_image, workdir, cpus, memory_mb, network_mode, env, build_timeout_sec;
                         [agent] user; [verifier] timeout_sec, env, user

What demands more (several steps or services, GPUs, a verifier of its own) is refused before the run.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.base.settings import UserError
from hone.environments.containers import ContainerLimits, image_of

#: What task.toml may hold of [environment]. Limits of storage are not applied.
_READ = {
    *("docker_image", "workdir", "cpus", "memory", "memory_mb", "env", "build_timeout_sec"),
    *("allow_internet", "network_mode", "storage", "storage_mb", "os"),
}
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}  # in MB, of `memory = "2G"`


@dataclass(frozen=True)
class HarborTask:
    """One folder. `image`: of its container; None: it needs none. `is_built`: hone builds it from environment/."""

    folder: Path
    instruction: str
    workdir: str | None  # None: the image's
    image: str | None
    is_built: bool
    build_seconds: float
    limits: ContainerLimits
    variables: Mapping[str, str]
    user: str | None  # of the model's commands; None: the image's
    test_seconds: float
    test_variables: Mapping[str, str]
    test_user: str | None


def read_tasks(folder: Path) -> dict[str, HarborTask]:
    """The tasks of a folder by name; a folder that is a task itself is the only one, by the name "".

    Raises UserError for a folder without tasks, and for a task that cannot be played here.
    """
    if (folder / "task.toml").is_file():
        return {"": read_task(folder)}
    tasks = {file.parent.name: read_task(file.parent) for file in sorted(folder.glob("*/task.toml"))}
    if not tasks:
        raise UserError(f"environment harbor:{folder}: no task.toml in it or in its folders")
    return tasks


def read_task(folder: Path) -> HarborTask:
    """Raises UserError for a task that cannot be played here."""
    file = folder / "task.toml"
    settings = _toml(file)
    try:
        return _task(folder, settings)
    except (ValueError, TypeError, OverflowError) as error:  # of a setting that is not of its type
        raise UserError(f"{file}: {error}") from error


def _task(folder: Path, settings: Mapping[str, Any]) -> HarborTask:
    """Raises UserError, and ValueError, TypeError or OverflowError for a setting of another type."""
    environment, verifier, agent = (dict(settings.get(name) or {}) for name in ("environment", "verifier", "agent"))
    _check(folder, settings, environment, verifier)
    image = _image(folder, environment)
    is_built = image is None and (folder / "environment" / "Dockerfile").exists()
    if is_built:
        image = image_of(folder / "environment")
    workdir = environment.get("workdir") or (None if image else "/app")
    if image is None:
        _check_without_image(folder, str(workdir), agent, verifier)
    limits = ContainerLimits(
        _memory(folder, environment), float(environment.get("cpus") or 1.0), _has_network(folder, settings)
    )
    if limits.network and image is None:
        raise UserError(f"{folder}: task.toml demands a network, and bubblewrap gives none; give the task an image")
    return HarborTask(
        folder=folder,
        instruction=_instruction(folder / "instruction.md"),
        workdir=None if workdir is None else str(workdir),
        image=image,
        is_built=is_built,
        build_seconds=float(environment.get("build_timeout_sec") or 600.0),
        limits=limits,
        variables=_variables(folder, "environment", environment),
        user=_user(agent),
        test_seconds=float(verifier.get("timeout_sec") or 600.0),
        test_variables=_variables(folder, "verifier", verifier),
        test_user=_user(verifier),
    )


def _check(
    folder: Path, settings: Mapping[str, Any], environment: Mapping[str, Any], verifier: Mapping[str, Any]
) -> None:
    """Raises UserError for a file that is missing, and for what is not played with any runtime."""
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is missing")
    for name in _COMPOSE:
        if (folder / "environment" / name).exists():
            raise UserError(f"{folder}: environment/{name} needs several containers; only one is started")
    if settings.get("steps"):
        raise UserError(f"{folder}: a task of several steps is not played; give one with a single instruction")
    if verifier.get("environment") or verifier.get("environment_mode") == "separate" or verifier.get("collect"):
        raise UserError(f"{folder}: task.toml demands a container for the verifier alone, which is not started")
    if environment.get("gpus"):
        raise UserError(f"{folder}: task.toml demands {environment['gpus']} GPUs, and tasks get none")
    if str(environment.get("os") or "linux").lower() != "linux":
        raise UserError(f"{folder}: task.toml has [environment] os {environment['os']}; only linux is played")
    for key, value in environment.items():
        if key not in _READ and value not in _OFF:
            raise UserError(f"{folder}: task.toml has [environment] {key}, which is not supported; remove it")


def _image(folder: Path, environment: Mapping[str, Any]) -> str | None:
    """Raises UserError for what is no name of an image: docker would take it for an option."""
    image = environment.get("docker_image") or None
    if image is not None and not re.fullmatch(r"\w[\w./:@-]*", str(image)):
        raise UserError(f"{folder}: [environment] docker_image is {image!r}; give the name of an image")
    return None if image is None else str(image)


def _instruction(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: {error}") from error


def _check_without_image(folder: Path, workdir: str, agent: Mapping[str, Any], verifier: Mapping[str, Any]) -> None:
    if not re.fullmatch(r"/(?!tests\b|logs\b|usr\b|proc\b|dev\b|run\b|tmp\b)[\w./-]*\w", workdir) or ".." in workdir:
        raise UserError(f"{folder}: [environment] workdir is {workdir}; give a folder of its own, such as /app")
    for name, section in (("agent", agent), ("verifier", verifier)):
        if section.get("user") not in (None, "root"):
            raise UserError(f"{folder}: task.toml has [{name}] user, for which the task needs an image")


def _has_network(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the task demands a network. Without a word on it there is none, unlike in Harbor."""
    modes = {}
    for name in ("environment", "agent", "verifier"):
        section = settings.get(name) or {}
        if mode := section.get("network_mode"):
            modes[name] = mode
        elif name == "environment" and section.get("allow_internet") is True:
            modes[name] = "public"
    wanted = set(modes.values()) or {"no-network"}
    if len(wanted) > 1 or not wanted <= {"public", "no-network"}:
        listed = ", ".join(f"[{name}] {mode}" for name, mode in modes.items())
        raise UserError(f"{folder}: network_mode is {listed}; give all the same: public or no-network")
    return wanted == {"public"}


def _memory(folder: Path, environment: Mapping[str, Any]) -> int:
    """In MB."""
    size = str(environment.get("memory") or "").strip().upper()
    if environment.get("memory_mb") or not size:
        return int(environment.get("memory_mb") or ContainerLimits.memory_mb)
    match = re.fullmatch(r"([\d.]+)([KMG])", size)
    if match is None:
        raise UserError(f"{folder}: [environment] memory is {environment['memory']!r}; give memory_mb = 2048")
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


def _variables(folder: Path, name: str, section: Mapping[str, Any]) -> dict[str, str]:
    """Raises UserError for `${VARIABLE}`: hone's own environment is never given to what a model runs."""
    values = {str(key): str(value) for key, value in dict(section.get("env") or {}).items()}
    for key, value in values.items():
        if "${" in value:
            raise UserError(f"{folder}: [{name}] env {key} is {value!r}, of hone's environment; give the value itself")
    return values


def _user(section: Mapping[str, Any]) -> str | None:
    return None if section.get("user") is None else str(section["user"])


def _toml(file: Path) -> dict[str, Any]:
    if sys.version_info < (3, 11):
        raise UserError("environment harbor: task.toml is read by Python 3.11 or later; use a newer one")
    tomllib: Any = importlib.import_module("tomllib")
    try:
        settings: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of both: TOML, and UTF-8
        raise UserError(f"{file}: {error}") from error
    return settings
