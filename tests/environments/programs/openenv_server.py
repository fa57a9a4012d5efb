"""An OpenEnv server on loopback; its argument is the port. An episode has three steps; each earns its letters e."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Say(Action):
    text: str


class Heard(Observation):
    echo: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=str(seed), step_count=0)
        return Heard(echo=f"Seed {seed}.", done=False)

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        count = action.text.count("e")
        return Heard(echo=f"{count} letters", done=self._state.step_count == 3, reward=float(count))

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_app(Echo, Say, Heard, env_name="echo", max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
