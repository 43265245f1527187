"""The plan of a save by several processes: agreed on once per schema, then kept by each."""

# Rule 1: nothing is exchanged where this process knows the schema from an earlier save. Processes
#   that do not agree on that find out before anything is committed.
# Rule 2: what a chunk grid depends on is equal in all processes: the limits that memory and store
#   put on chunks are those of the process with the lowest, settled with the first plan.

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import MismatchError
from asyncckpt.planning.save import PLANNER_VERSION
from asyncckpt.ports import Sizes, Store
from asyncckpt.runtime import Runtime
from asyncckpt.save.plan_cache import Layout, LayoutCache, layout_of
from asyncckpt.save.snapshot import SaveRequest

NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all processes agreed on for one schema.

    Attributes:
        digest: of the schema.
        budget_nbytes: memory that every process has for chunks that are held whole.
        chunk_nbytes: target size of chunks at most.
        chunk_limit_nbytes: largest chunk that can be stored.
    """

    digest: str
    budget_nbytes: int
    chunk_nbytes: int
    chunk_limit_nbytes: int


async def shared_layout(
    round_: Round,
    request: SaveRequest,
    sizes: Sizes,
    *,
    runtime: Runtime,
    store: Store,
    cache: LayoutCache,
) -> Layout:
    """Return this process' layout, after all have agreed on what they save.

    Raises:
        MismatchError: the trees differ; names the processes.
        UsageError: as `make_layout`.
    """
    key = schema_key(request)
    agreed = cache.agreement(key)
    fresh = agreed is None
    if agreed is None:
        own = Agreement(
            schema_digest(request),
            runtime.budget_nbytes,
            sizes.chunk_nbytes or NO_LIMIT,
            sizes.chunk_limit_nbytes or NO_LIMIT,
        )
        agreed = await (_settle(round_, own) if round_.leads else _propose(round_, own))
        cache.agree(key, agreed)
    sizes = replace(
        sizes,
        chunk_nbytes=_limit(agreed.chunk_nbytes),
        chunk_limit_nbytes=_limit(agreed.chunk_limit_nbytes),
    )
    layout = await layout_of(
        request.snapshot,
        request.options,
        sizes,
        runtime=runtime,
        store=store,
        cache=cache,
        budget_nbytes=agreed.budget_nbytes,
        process=round_.group.process_index,
        process_count=round_.group.process_count,
    )
    return replace(layout, schema_digest=agreed.digest, fresh=fresh)


async def _settle(round_: Round, own: Agreement) -> Agreement:
    """Agree with all others, as process 0."""
    proposals = [own]
    for process, message in sorted((await round_.gathered("plan", instead="ready")).items()):
        proposal = Agreement(**json.loads(message))
        if proposal.digest != own.digest:
            group = round_.group
            raise MismatchError(
                f"{group.named(process)} saves another tree than {group.named(0)}: paths, shapes, "
                "dtypes, shardings or options differ; nothing was saved. Save the same tree on all "
                "processes",
                expected=own.digest,
                found=proposal.digest,
            )
        proposals.append(proposal)
    agreed = Agreement(
        own.digest,
        min(proposal.budget_nbytes for proposal in proposals),
        min(proposal.chunk_nbytes for proposal in proposals),
        min(proposal.chunk_limit_nbytes for proposal in proposals),
    )
    await round_.answer("planned", _encoded(agreed))
    return agreed


async def _propose(round_: Round, own: Agreement) -> Agreement:
    """Agree with process 0."""
    await round_.post("plan", _encoded(own))
    return Agreement(**json.loads(await round_.answered("planned")))


def _encoded(agreement: Agreement) -> bytes:
    return json.dumps({name: getattr(agreement, name) for name in Agreement.__slots__}).encode()


def _limit(nbytes: int) -> int | None:
    return None if nbytes == NO_LIMIT else nbytes


def schema_key(request: SaveRequest) -> Sequence[Any]:
    """Return what this process' part of the schema is made of; compared part by part."""
    snapshot, options = request.snapshot, request.options
    return [
        snapshot.paths,
        snapshot.kinds,
        [(source.spec, source.shards, source.partition) for source in snapshot.sources],
        snapshot.tied,
        snapshot.extra,
        snapshot.structure,
        _options(options),
        options.leaf_options,
    ]


def schema_digest(request: SaveRequest) -> str:
    """Return the SHA-256 (hex) of what all processes must have in common."""
    snapshot = request.snapshot
    facts = [
        PLANNER_VERSION,
        snapshot.paths,
        snapshot.kinds,
        [
            [source.spec.shape, source.spec.dtype, _partition(source.partition)]
            for source in snapshot.sources
        ],
        sorted(snapshot.tied.items()),
        sorted((leaf, dict(extra)) for leaf, extra in snapshot.extra.items()),
        snapshot.structure.to_json(),
        _options(request.options),
    ]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _partition(partition: Any) -> Any:
    return None if partition is None else [partition.cuts, partition.holders]


def _options(options: Any) -> list[Any]:
    return [
        options.chunk_nbytes,
        options.compression,
        options.compression_level,
        options.layout,
        options.private,
    ]
