"""The plan of a save by several processes: agreed on once per schema, then cached by each."""

# Rule 1: nothing is exchanged if this process knows the schema from an earlier save of its group.
#   If another process does not, they find out before anything is committed.
# Rule 2: if the trees of processes differ, or may, the processes compare digests before each save:
#   a leaf that appears on one process changes what the others must stage, and once they have
#   staged, their callers may mutate the rest. A leaf that has changed on one process may change
#   again; the buffers of a data loader in a `PerProcess` may change at any time. An agreement that
#   all processes know needs no further exchange, even if an earlier group made it.
# Rule 3: all processes have equal chunk grids: memory and store limit chunks to the lowest limits
#   of all processes, agreed on with the first plan.
# Rule 4: if schemas differ, every process merges the same schemas to the same result.

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import MismatchError, UsageError
from asyncckpt.flow.threads import Workers
from asyncckpt.planning.merge import merge_schemas
from asyncckpt.planning.schema import (
    MAX_SCHEMA_NBYTES,
    Schema,
    SchemaLeaf,
    decode_schema,
    encode_schema,
    schema_digest,
)
from asyncckpt.ports import AttemptFiles
from asyncckpt.save.commit import Opened
from asyncckpt.save.plan_cache import (
    Agreement,
    Layout,
    LayoutCache,
    Limits,
    Terms,
    layout_of,
    options_of_leaf,
    tree_key,
)
from asyncckpt.save.snapshot import SaveRequest, Snapshot, completed
from asyncckpt.tree import process_values

KNOWN = "known"
"""Posted by a process that already has a plan while it waits for the attempt to appear."""

VISIBLE_S = 15.0
"""How long a begun attempt or a passed-on file may stay invisible: network file systems cache
directories for some seconds."""

SHARED_OPTIONS = "chunk_nbytes", "compression", "compression_level", "layout", "tree", "private"


class _Proposal(NamedTuple):
    """Message of a process to process 0 before a save; a JSON array.

    Attributes:
        change: first leaf that differs from an earlier save; empty for none.
        digest: digest of its schema.
        partial: it holds only a part of some leaf.
        kept: digest of its earlier agreement on this schema; empty for none.
        known: this group made that agreement.
        limits: its own limits.
    """

    change: str
    digest: str
    partial: bool
    kept: str
    known: bool
    limits: Limits


@dataclass(eq=False, repr=False)
class SharedPlan:
    """Planning of this process's part in a save.

    Attributes:
        round_: messages of the processes about this save.
        attempt: returns the files of the attempt, once it is open.
    """

    round_: Round
    request: SaveRequest
    attempt: Opened
    compute: Workers

    async def agree(self, terms: Terms, cache: LayoutCache) -> tuple[Snapshot, Layout]:
        """Return the tree of all processes, and this process's layout.

        Raises:
            MismatchError: the trees cannot be merged; names path and processes.
            UsageError: as `make_layout`.
        """
        request, group = self.request, self.round_.group
        key = schema_key(request)
        agreed = cache.agreement(key)
        known = agreed is not None and agreed.run_id == group.run_id
        compared = not known or cache.may_differ or request.options.tree == "union"
        if agreed is None or compared:
            change = "" if agreed is not None else first_change(cache.latest_agreed(), key)
            agreed, known = await self._agreement(terms, change, agreed, cache)
            cache.agree(key, agreed)
        snapshot = request.snapshot
        if agreed.merged is not None:
            snapshot = completed(snapshot, agreed.merged, group.process_index, group.process_count)
            if not cache.may_differ and self._tree() == "union":
                # The values of a process may have other shapes in each save.
                cache.may_differ = bool(process_values(agreed.merged.structure))
            cache.may_differ |= agreed.merged.keys_differ
        terms = terms._replace(
            limits=agreed.limits, process=group.process_index, process_count=group.process_count
        )
        layout = await layout_of(snapshot, terms, cache=cache, compute=self.compute)
        layout = replace(layout, schema_digest=agreed.digest, fresh=not known, compared=compared)
        return snapshot, layout

    # -- if the schema is new, or may be new to another process

    async def _agreement(
        self, terms: Terms, change: str, kept: Agreement | None, cache: LayoutCache
    ) -> tuple[Agreement, bool]:
        """Agree with the others; also return whether all knew the agreement from their group.

        `kept` is an earlier agreement on an equal schema, possibly of an earlier group.
        """
        run, schema = self.compute.run, None
        if kept is None:
            schema = await run(schema_of, self.request)
            digest = await run(schema_digest, schema)
            partial = any(leaf.partial for leaf in schema.leaves)
        else:
            digest, partial = kept.own, kept.partial
        run_id = self.round_.group.run_id
        known = kept is not None and kept.run_id == run_id
        own = _Proposal(change, digest, partial, kept.digest if kept else "", known, terms.limits)
        if self.round_.leads:
            answer = await self._settle(own, cache)
        else:
            await self.round_.post("plan", json.dumps(own).encode())
            answer = json.loads(await self.round_.answered("planned"))
        # From process 0, so that all processes compare before the same saves.
        cache.may_differ = answer["may_differ"]
        if kept is not None and answer["known"]:
            return kept, True
        agreed = Agreement(run_id, digest, partial, Limits(*answer["limits"]))
        if not answer["merge"]:
            return agreed, False
        if kept is not None and answer["kept"]:
            return replace(agreed, merged=kept.merged), False
        if schema is None:
            schema = await run(schema_of, self.request)
        schemas = await self._exchange(schema)
        return replace(agreed, merged=await run(merge_schemas, schemas, self._tree())), False

    async def _settle(self, own: _Proposal, cache: LayoutCache) -> dict[str, Any]:
        """Compare the proposals of all processes, as process 0."""
        found = await self.round_.gathered(
            "plan",
            instead=KNOWN,
            refuse=lambda process, _: out_of_step(self.round_, cache, 0, process, own.change),
        )
        every = [own, *(_Proposal(*json.loads(message)) for message in found.values())]
        kept = own.kept != "" and all(one.kept == own.kept for one in every)
        answer = {
            "merge": any(one.partial or one.digest != own.digest for one in every),
            "kept": kept,
            "known": kept and all(one.known for one in every),
            "may_differ": cache.may_differ,
            "limits": [
                min((nbytes for nbytes in limit if nbytes is not None), default=None)
                for limit in zip(*(one.limits for one in every), strict=True)
            ],
        }
        await self.round_.answer("planned", json.dumps(answer).encode())
        return answer

    async def _exchange(self, own: Schema) -> dict[int, Schema]:
        """Return the schemas of all processes, exchanged through the store."""
        attempt = await self.attempt()
        if self.round_.leads:
            bundle = await self._bundle(attempt, own)
        else:
            path = f"schema-{self.round_.group.process_index}"
            await attempt.pass_on(path, await self.compute.run(encode_schema, own))
            await self.round_.post("schema", path.encode())
            bundle = await self._taken(attempt, (await self.round_.answered("schemas")).decode())
        return await self.compute.run(_unbundled, bundle)

    async def _bundle(self, attempt: AttemptFiles, own: Schema) -> bytes:
        """Gather the distinct schemas and pass them on to all processes, as process 0."""
        distinct = {await self.compute.run(encode_schema, own): [0]}
        for process, message in sorted((await self.round_.gathered("schema")).items()):
            data = await self._taken(attempt, message.decode())
            distinct.setdefault(data, []).append(process)
        bundle = await self.compute.run(_bundled, distinct)
        await attempt.pass_on("schemas", bundle)
        await self.round_.answer("schemas", b"schemas")
        return bundle

    async def _taken(self, attempt: AttemptFiles, path: str) -> bytes:
        return await taken(attempt, path, self.round_, max_nbytes=2 * MAX_SCHEMA_NBYTES)

    def _tree(self) -> Literal["same", "union"]:
        tree = self.request.options.tree
        if tree == "auto":
            return "same" if self.round_.group.coordinator.name == "jax" else "union"
        return tree


def _bundled(distinct: Mapping[bytes, Sequence[int]]) -> bytes:
    """Encode schemas and the processes of each, for `_unbundled`."""
    return json.dumps(
        [[processes, base64.b64encode(data).decode()] for data, processes in distinct.items()]
    ).encode()


def _unbundled(bundle: bytes) -> dict[int, Schema]:
    """Decode the schemas of all processes. Blocking: there may be one per process."""
    schemas: dict[int, Schema] = {}
    for processes, data in json.loads(bundle):
        schema = decode_schema(base64.b64decode(data), file=f"schema-{processes[0]}")
        schemas.update(dict.fromkeys(processes, schema))
    return schemas


def out_of_step(
    round_: Round, cache: LayoutCache, changed: int, other: int, change: str
) -> MismatchError:
    """Return the error for a process that plans anew while another reuses its plan.

    Process 0 then has all processes compare their trees before each save.
    """
    cache.may_differ = True
    group = round_.group
    return MismatchError(
        f"{change or 'the tree'}: this has changed on {group.named(changed)} since an earlier "
        f"save, or is new to it, but not on {group.named(other)}, which had begun to copy under "
        "an earlier plan; nothing was saved. Save the same tree, with the same shardings and "
        "options, on all processes. If leaves may change on some processes only, save again: from "
        "now on the processes compare their trees before each save, as they always do with "
        'SaveOptions(tree="union")',
        path=change or None,
    )


def first_change(before: Sequence[Any] | None, after: Sequence[Any]) -> str:
    """Return the path of the first leaf that differs from an earlier save, or an empty string."""
    if before is None:
        return ""
    old, new = _by_path(before), _by_path(after)
    changed = (path for path, leaf in new.items() if path not in old or old[path] != leaf)
    return next(itertools.chain(changed, (path for path in old if path not in new)), "")


def _by_path(key: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
    """Return kind and array of every leaf in a schema's key, by path."""
    paths, kinds, array_leaf, specs, divisions = key[:5]
    arrays = [(spec, divisions.get(number)) for number, spec in enumerate(specs)]
    array_of = dict(zip(array_leaf, arrays, strict=True))
    return {path: (kinds[leaf], array_of.get(leaf)) for leaf, path in enumerate(paths)}


async def taken(attempt: AttemptFiles, path: str, round_: Round, *, max_nbytes: int) -> bytes:
    """Return a file that another process has passed on, once it is visible.

    Raises:
        UsageError: it is not visible here after `VISIBLE_S`.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + VISIBLE_S
    while (data := await attempt.taken(path, max_nbytes=max_nbytes)) is None:
        if loop.time() > end:
            group = round_.group
            raise UsageError(
                f"{attempt.location}: {group.named(group.process_index)} cannot see {path!r}, "
                "which another process has written: the processes do not share this location; "
                "pass a directory that every host mounts, or the URL of a bucket",
                location=attempt.location,
                found=path,
            )
        await asyncio.sleep(0.1)
    return data


def schema_key(request: SaveRequest) -> Sequence[Any]:
    """Return the key of this process's part of the schema; compared part by part."""
    return [*tree_key(request.snapshot), _shared_options(request), request.options.leaf_options]


def schema_of(request: SaveRequest) -> Schema:
    """Return the schema of this process's tree, for the other processes.

    Raises:
        …: from `leaf_options`; a note names the path.
    """
    snapshot, options = request.snapshot, request.options
    number_of = {leaf: number for number, leaf in enumerate(snapshot.array_leaf)}
    leaves: list[SchemaLeaf] = []
    for leaf, kind in enumerate(snapshot.kinds):
        number = number_of.get(leaf)
        if number is None:
            leaves.append(SchemaLeaf(kind))
            continue
        source = snapshot.sources[number]
        tied = snapshot.tied.get(number)
        boxes = None
        if source.partition is None and source.shards is not None:
            boxes = tuple([shard.box for shard in source.shards])
        leaves.append(
            SchemaLeaf(
                kind,
                source.spec,
                options_of_leaf(options, snapshot.paths[leaf], source.spec),
                json.dumps(dict(source.extra), sort_keys=True) if source.extra else "",
                None if tied is None else snapshot.array_leaf[tied],
                source.partition,
                boxes,
                source.partial,
            )
        )
    return Schema(snapshot.structure, tuple(leaves), _shared_options(request))


def _shared_options(request: SaveRequest) -> dict[str, Any]:
    """Return the options that must be equal on all processes, because the plan depends on them."""
    return {name: getattr(request.options, name) for name in SHARED_OPTIONS}
