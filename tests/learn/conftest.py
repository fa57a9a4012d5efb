"""The model that the tests of training start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.model.tiny import create
from tests.learn.policies import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    create(path, TINY, ["Zoey is a knight."] * 3, seed=0)
    return path
