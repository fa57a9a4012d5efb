"""A small model with a chat template, and a real server of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import uvicorn

from hone.base import checksums
from hone.base.guard import LOOPBACK
from hone.base.web import listen, settings
from hone.model import tiny
from hone.model.load import load_tokenizer
from hone.recipe.sections.model import ModelConfig, TinyConfig
from hone.serve.app import make_app
from hone.serve.engine_thread import EngineThread
from hone.serve.model import ServedModel, load_served

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary checkpoint folder; its model says nothing sensible, in a few hundred different tokens."""
    folder = tmp_path_factory.mktemp("plain") / "small"
    words = "the cat sat on a mat and saw an elephant, then it said: user assistant system hello"
    size = TinyConfig(vocab_size=300, hidden_size=32, layers=2, heads=4, kv_heads=2, mlp_size=48, max_positions=256)
    tiny.create(folder, size, [words], seed=0)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    checksums.write(folder)
    return folder


@pytest.fixture(scope="session")
def model(folder: Path) -> ServedModel:
    torch.set_num_threads(1)
    return load_served(str(folder), ["eval.sampling.max_tokens=20"])


@pytest.fixture(scope="session")
def url(model: ServedModel) -> Iterator[str]:
    """Base address of the API."""
    listener = listen("127.0.0.1", 0)
    with EngineThread(model.engine) as thread:
        app = make_app(model, thread, LOOPBACK)
        config = settings(app)
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
