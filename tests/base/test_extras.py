"""The command that installs an extra names packages, since hone itself may come from a checkout."""

from __future__ import annotations

import pytest

from hone.base import extras


def test_the_packages_of_an_extra_within_another_one() -> None:
    command = extras.needed("view")  # hone-rl[serve]
    assert command.startswith("pip install 'starlette")
    assert "'uvicorn" in command
    assert "hone-rl" not in command


def test_an_unknown_extra_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing_of_the_kind"):
        extras.needed("nothing_of_the_kind")


def test_a_folder_that_was_never_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "PACKAGE", "a-package-that-is-not-installed")
    assert "checkout" in extras.needed("view")


def test_no_message_asks_for_a_package_that_is_on_no_index() -> None:
    from pathlib import Path

    import hone

    asked = [str(file) for file in Path(hone.__file__).parent.rglob("*.py") if "install 'hone-rl[" in file.read_text()]
    assert asked == []
