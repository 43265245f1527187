"""Breaking one rule of the object store at a time, to see that the matrix notices."""

from __future__ import annotations

import pytest

from asyncckpt.errors import CheckpointExistsError
from asyncckpt.stores.objects.attempt import ObjectAttempt
from asyncckpt.stores.objects.client import Body
from asyncckpt.stores.objects.datafile import ObjectDataFile, Sending
from asyncckpt.stores.objects.fixed import FixedContents
from asyncckpt.stores.objects.layout import join
from asyncckpt.stores.objects.publish import Publication


def record_first(patch: pytest.MonkeyPatch) -> None:
    """Files of one request are sent when the record stands already."""
    late: list[tuple[Sending, str, bytes]] = []
    publish = ObjectAttempt._publish

    async def write(self: ObjectDataFile, body: Body) -> bool:
        late.append((self._sending, self._key, bytes(body)))
        return True

    async def publish_early(self: ObjectAttempt, record: bytes) -> None:
        await publish(self, record)
        for sending, key, body in late:
            if sending is self._sending:
                await sending.send(key, body)

    patch.setattr(ObjectDataFile, "_send_whole", write)
    patch.setattr(ObjectAttempt, "_publish", publish_early)


def no_read_back(patch: pytest.MonkeyPatch) -> None:
    """That something stands at the record's key counts as somebody else's victory."""

    async def create(self: Publication) -> None:
        if not await self._requests.create(self._key, self._record):
            raise CheckpointExistsError(
                f"{self._location}: a checkpoint stands here already", location=self._location
            )

    patch.setattr(Publication, "create", create)


def fixed_names_first(patch: pytest.MonkeyPatch) -> None:
    """Names that all attempts share are written before the record."""
    put = ObjectAttempt.put

    async def put_at_once(self: ObjectAttempt, path: str, data: bytes | memoryview) -> None:
        await put(self, path, data)
        if self._save_id not in path:
            await self._context.requests.replace(join(self._name, path), bytes(data))

    patch.setattr(ObjectAttempt, "put", put_at_once)


def first_contents_stay(patch: pytest.MonkeyPatch) -> None:
    """Of the contents that a save has kept of one name, the oldest become the file's."""
    put = FixedContents.put

    async def put_once(self: FixedContents, path: str, data: bytes) -> None:
        before = dict(self.files)
        await put(self, path, data)
        self.files |= before

    patch.setattr(FixedContents, "put", put_once)


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
    """An attempt that fails leaves its uploads open."""

    async def abort_nothing(self: ObjectAttempt) -> None:
        pass

    patch.setattr(ObjectAttempt, "_abort_uploads", abort_nothing)
