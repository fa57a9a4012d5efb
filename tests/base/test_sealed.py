"""seal.json: whatever cuts a replacement, the file is never taken for damaged."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.base import checksums, sealed
from hone.base.settings import UserError


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, 0, 1, 2])), min_size=1, max_size=6))
def test_a_file_passes_after_every_write_that_failed(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[str, int | None]]
) -> None:
    """`attempts`: a text, and before which of its writes the disk is full (None: never)."""
    folder = tmp_path_factory.mktemp("run")
    write = checksums.put
    for text, last in attempts:
        left = [10**9 if last is None else last]

        def put(path: Path, content: str | bytes, left: list[int] = left) -> None:
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            left[0] -= 1
            write(path, content)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checksums, "put", put)
            try:
                sealed.put(folder, "config.json", text)
                assert (folder / "config.json").read_text() == text
            except OSError:
                assert last is not None
        sealed.require_file(folder, "config.json")
    sealed.put(folder, "config.json", "end")
    (folder / "config.json").write_text("enc")
    with pytest.raises(UserError, match="damaged"):
        sealed.require_file(folder, "config.json")


def test_a_changed_seal_is_named_instead_of_the_files_that_it_lists(tmp_path: Path) -> None:
    sealed.put(tmp_path, "config.json", "text")
    data = (tmp_path / "seal.json").read_bytes()
    for i in range(len(data)):
        changed = bytes([*data[:i], data[i] ^ 1, *data[i + 1 :]])
        (tmp_path / "seal.json").write_bytes(changed)
        error = refused(tmp_path)
        if b'"sha256":' in changed:  # else the name of the checksum is gone, as in a seal of an older version
            assert error.startswith(f"{tmp_path / 'seal.json'} ")


def refused(folder: Path) -> str:
    try:
        sealed.require_file(folder, "config.json")
    except UserError as error:
        return str(error)
    return ""
