"""Detection of the file system under a root."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt.stores.local.locks import is_certainly_local


@pytest.mark.parametrize("name", ["odd\x0cname", "odd\rname", "odd\x85name", "odd\udcffname"])
def test_a_mount_point_may_have_any_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\nhost:/b /{name} nfs4 rw 0 0\n"
    data = mounts.encode("utf-8", "surrogateescape")
    monkeypatch.setattr(Path, "read_bytes", lambda _: data)
    monkeypatch.setattr("os.path.realpath", lambda path: path)
    assert is_certainly_local("/run")
    assert not is_certainly_local(f"/{name}/run")
