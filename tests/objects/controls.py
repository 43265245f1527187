"""Breaking one rule of the object store at a time, to see that the matrix notices."""

from __future__ import annotations

import pytest

from asyncckpt.errors import CheckpointExistsError
from asyncckpt.stores.objects.attempt import ObjectAttempt
from asyncckpt.stores.objects.clients.client import Body
from asyncckpt.stores.objects.datafile import Sending, WindowFile
from asyncckpt.stores.objects.export import ObjectExport
from asyncckpt.stores.objects.layout import join
from asyncckpt.stores.objects.publish import Publication


def record_first(patch: pytest.MonkeyPatch) -> None:
    """Files of one request are sent after the record."""
    late: list[tuple[Sending, str, bytes]] = []
    check = ObjectAttempt._check_claim

    async def write(self: WindowFile, body: Body) -> bool:
        late.append((self._sending, self._key, bytes(body)))
        return True

    async def after_the_record(self: ObjectAttempt) -> None:
        await check(self)
        for sending, key, body in late:
            if sending is self._sending:
                await sending.send(key, body)

    patch.setattr(WindowFile, "_send", write)
    patch.setattr(ObjectAttempt, "_check_claim", after_the_record)


def no_read_back(patch: pytest.MonkeyPatch) -> None:
    """That something stands at the record's key counts as somebody else's victory."""

    async def create(self: Publication) -> None:
        if not await self._requests.create(self._key, self.record):
            raise CheckpointExistsError(
                f"{self._location}: a checkpoint stands here already", location=self._location
            )

    patch.setattr(Publication, "create", create)


def fixed_names_first(patch: pytest.MonkeyPatch) -> None:
    """Names that all attempts share are written before the record."""
    put = ObjectAttempt.put

    async def put_at_once(
        self: ObjectAttempt, path: str, data: bytes | memoryview, *, in_record: bool = False
    ) -> None:
        await put(self, path, data, in_record=in_record)
        if self._save_id not in path:
            await self._context.requests.replace(join(self._name, path), bytes(data))

    patch.setattr(ObjectAttempt, "put", put_at_once)


def first_contents_stay(patch: pytest.MonkeyPatch) -> None:
    """Of the contents that a save has given of one name, the oldest become the file's."""
    put = ObjectAttempt.put

    async def put_once(
        self: ObjectAttempt, path: str, data: bytes | memoryview, *, in_record: bool = False
    ) -> None:
        before = dict(self._fixed)
        await put(self, path, data, in_record=in_record)
        self._fixed |= before

    patch.setattr(ObjectAttempt, "put", put_once)


def errors_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A data file counts as stored whatever the answer to its request was."""
    send = Sending.send

    async def send_and_hope(self: Sending, key: str, body: Body) -> tuple[str, bool]:
        try:
            return await send(self, key, body)
        except Exception:
            self.error = None
            return key, True

    patch.setattr(Sending, "send", send_and_hope)


def uploads_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """An export that fails leaves its uploads open."""

    async def abort_nothing(self: ObjectExport) -> None:
        pass

    patch.setattr(ObjectExport, "_abort", abort_nothing)
