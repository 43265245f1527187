"""Claims of a root on an object store: takeover, which records count, which writers are fenced.

A stopped writer cannot be locked out of an object store: when it wakes up, it makes the request
that it was about to make. A takeover does not prevent that. It decides which records count::

    .asyncckpt/claim-<e>              created on condition that there is none
    .asyncckpt/inherited-<e>          save ids of the records that counted when claim e was made
    .asyncckpt/replaces-<new>-<old>   save ids of a record about to be replaced, and of the new one

A record of epoch k counts if k is 0, or if no claim above k has a list, or if the highest list
names it or one that it replaced. Every reader of a record checks that.
"""

# Rule 1: the order of a takeover is claim, listing, list, first record. The order of a save is
#   record, check for the next claim, acknowledgement. In every interleaving, either the listing
#   comes after the record, so the list names it, or the writer sees the claim and does not
#   acknowledge. (test_a_writer_that_was_stopped_anywhere_is_fenced)
# Rule 2: by induction, every later list names all records acknowledged before its claim: at its
#   listing, the highest list names them, or there is no list above them. It does not matter which
#   list was the highest then. (test_any_sequence_of_saves_and_takeovers_is_one_history)
# Rule 3: only the highest list decides. A process that was stopped between claim and list may write
#   its list an hour later, and would otherwise hide all later checkpoints.
#   (test_a_list_that_comes_late_hides_nothing)
# Rule 4: a claim without a list, or with a damaged one, does not affect which records count. A
#   crash in a takeover hides no checkpoint. (test_a_claim_without_its_list_hides_nothing)
# Rule 5: claims are read after the record was read or written. An earlier answer would miss a
#   takeover in between. (test_a_reader_asks_for_the_claims_after_it_has_read_the_record)
# Rule 6: a writer that was stopped before replacing a record still does so when it wakes up: its
#   condition is the old record, which no takeover changes. The list names only the old record, so
#   the step would be lost. So the writer first notes what it is about to replace, and the new
#   record counts as the old one.
#   (test_a_replacement_that_comes_late_takes_the_place_of_what_it_replaced)
# Rule 7: claims and lists never change, and claims are never removed. So the claim after e, if any,
#   is e + 1, and one request finds it.

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from asyncckpt.flow.shield import together
from asyncckpt.format.claim import (
    CLAIM_NBYTES,
    INHERITED_NBYTES,
    Claim,
    decode_claim,
    decode_inherited,
    encode_claim,
    encode_inherited,
)
from asyncckpt.log import logger
from asyncckpt.stores.claims import (
    CLAIM,
    INHERITED,
    claim_name,
    fenced_error,
    inherited_name,
    lost_error,
    new_claim,
)
from asyncckpt.stores.objects.clients.client import unless_missing
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import join
from asyncckpt.stores.objects.requests.requests import Requests
from asyncckpt.stores.paths import CONTROL

_REPLACES = re.compile(r"replaces-([0-9a-f]{32})-([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Seen:
    """Result of one listing.

    Attributes:
        claims: epochs of the claims, ascending.
        lists: epochs of the claims with a list, ascending.
        replaced: for the save id of a record, those of the records that it replaced, or wanted to
            replace when another save was faster.
    """

    claims: tuple[int, ...] = ()
    lists: tuple[int, ...] = ()
    replaced: Mapping[str, Collection[str]] = field(default_factory=dict)


class Claims:
    """The claims of one root, listed anew by each call; lists never change, and are kept.

    All methods raise `StoreError` if the store fails, and `UnsupportedFormatError` if the deciding
    list is of a newer release.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._inherited: dict[int, frozenset[str] | None] = {}
        self._lock = asyncio.Lock()
        self._begun = self._done = 0
        self._seen = Seen()

    async def seen(self) -> Seen:
        """Return the result of a listing that begins after this call. Waiting calls share it."""
        wanted = self._begun + 1
        async with self._lock:
            if self._done < wanted:
                self._begun += 1
                self._seen = await self._listed()
                self._done = self._begun
            return self._seen

    async def counts(self, save_id: str, epoch: int) -> bool:
        """Return whether a record that was read before this call is part of the run."""
        if not epoch:
            return True
        seen = await self.seen()
        for listed in reversed(seen.lists):
            if listed <= epoch:
                break
            inherited = await self._list_of(listed)
            if inherited is not None:
                return not inherited.isdisjoint(_line(save_id, seen.replaced))
        return True

    async def check(self, epoch: int, location: str = "", *, visible: bool | None = False) -> None:
        """Raise `FencedError` (see `fenced_error`) if there is a higher claim; not for epoch 0."""
        if epoch and (data := await self._read(claim_name(epoch + 1), CLAIM_NBYTES)) is not None:
            url, successor = self._requests.url, decode_claim(data)
            raise fenced_error(url, epoch, successor, location=location, visible=visible)

    async def take_over(self, committed: Callable[[], Awaitable[list[str]]]) -> Claim:
        """Make the next claim, on a store that creates objects conditionally.

        `committed` lists the save ids of the records of claimed epochs that count now.

        Raises:
            FencedError: another process made it first.
            StoreError: the claim or its list could not be written.
        """
        requests, seen = self._requests, await self.seen()
        made = new_claim(1 + max((0, *seen.claims, *seen.lists)))
        key, data = join(CONTROL, claim_name(made.epoch)), encode_claim(made)
        with reported("making a claim", requests.location(key)):
            if not await requests.create(key, data):
                found = await requests.read(key, max_nbytes=CLAIM_NBYTES)
                if found != data:  # else an earlier try made it, and its response was lost
                    raise lost_error(requests.url, made.epoch, decode_claim(found or b""))
        with reported("listing what the claim inherits", requests.url):
            inherited = encode_inherited(made.epoch, await committed())
        key = join(CONTROL, inherited_name(made.epoch))
        with reported("writing what the claim inherits", requests.location(key)):
            # An existing one is from an earlier try: no other process has this claim.
            await requests.create(key, inherited)
        await self.check(made.epoch)
        return made

    async def begin_replacing(self, old: str, new: str, epoch: int, location: str) -> None:
        """Check the claim, if any, and note that the save `new` is about to replace `old`."""
        if epoch:
            await self.check(epoch, location)
            name = _replaces(new, old)
            with reported("noting what is replaced", self._location(name)):
                await self._requests.replace(join(CONTROL, name), b"")

    async def end_replacing(self, old: str, new: str, epoch: int) -> None:
        """Remove the note of a replacement that was acknowledged. Raises `RequestError`."""
        if epoch:
            await self._requests.delete([join(CONTROL, _replaces(new, old))])

    async def read(self) -> list[Claim]:
        """Return the claims that can be read, ascending."""
        numbers = (await self.seen()).claims
        found = await together(self._read(claim_name(epoch), CLAIM_NBYTES) for epoch in numbers)
        return [claim for data in found if data and (claim := decode_claim(data)) is not None]

    async def _listed(self) -> Seen:
        with reported("listing the claims", self._requests.location(CONTROL)):
            listed = await self._requests.list_all(CONTROL, recursive=True)
        names = [entry.key.removeprefix(f"{CONTROL}/") for entry in listed]
        claims = sorted(int(found[1]) for name in names if (found := CLAIM.fullmatch(name)))
        lists = sorted(int(found[1]) for name in names if (found := INHERITED.fullmatch(name)))
        replaced: defaultdict[str, set[str]] = defaultdict(set)
        for name in names:
            if (note := _REPLACES.fullmatch(name)) is not None:
                replaced[note[1]].add(note[2])
        return Seen(tuple(claims), tuple(lists), replaced)

    async def _list_of(self, epoch: int) -> frozenset[str] | None:
        """Return the list of a claim; None if it is damaged or gone."""
        if epoch not in self._inherited:
            data = await self._read(inherited_name(epoch), INHERITED_NBYTES)
            if data is None:
                return None
            location = self._location(inherited_name(epoch))
            inherited = self._inherited[epoch] = decode_inherited(data, location=location)
            if inherited is None:
                logger.warning(
                    "%s: not a valid list of checkpoints; ignored, so steps of fenced processes "
                    "may be listed until the next takeover",
                    location,
                )
        return self._inherited[epoch]

    async def _read(self, name: str, most_nbytes: int) -> bytes | None:
        """Return the content of an object: None if it is missing, empty if it is too large."""
        with reported("reading the claims", self._location(name)):
            with unless_missing():
                return await self._requests.read(join(CONTROL, name), max_nbytes=most_nbytes) or b""
        return None

    def _location(self, name: str) -> str:
        return self._requests.location(join(CONTROL, name))


def _replaces(new: str, old: str) -> str:
    return f"replaces-{new}-{old}"


def _line(save_id: str, replaced: Mapping[str, Collection[str]]) -> set[str]:
    """Return a save id and all save ids that it replaced, directly or indirectly."""
    line, found = {save_id}, [save_id]
    while found:
        older = set(replaced.get(found.pop(), ())) - line
        line |= older
        found += older
    return line
