"""Which replicas are compared: alike by all holders, all in turn, a bounded share each time."""

from __future__ import annotations

import numpy as np

from asyncckpt.options import KIB, MIB
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.replicas import ALWAYS_NBYTES, SHARE_NBYTES, checked_rows
from asyncckpt.planning.save import SavePlan, plan_save
from asyncckpt.spec import ArraySpec

LEAVES = [
    LeafLayout(f"w{number}", ArraySpec((rows, 1 << 18), "float32"), 16 * MIB)
    for number, rows in enumerate((200, 1, 33, 90))
] + [LeafLayout("b", ArraySpec((100,), "float32"), 16 * MIB)]


def plan(process: int) -> SavePlan:
    return plan_save(
        LEAVES,
        data_file_nbytes=1 << 30,
        slot_nbytes=8 * MIB,
        page_nbytes=4 * KIB,
        aligned_chunk_nbytes=MIB,
        inline_nbytes=KIB,
        process=process,
        process_count=2,
    )


def test_all_are_compared_on_the_first_save_of_a_schema() -> None:
    assert len(checked_rows(plan(0), 5, whole=True)) == plan(0).arrays.chunk_count


def test_later_saves_compare_a_bounded_share_alike_and_everything_in_turn() -> None:
    plans = [plan(0), plan(1)]
    small = plans[0].row_payload <= ALWAYS_NBYTES
    turns = -(-sum(leaf.spec.nbytes for leaf in LEAVES) // SHARE_NBYTES) + 1
    seen: set[int] = set()
    for number in range(turns):
        chosen = [checked_rows(each, number, whole=False) for each in plans]
        chunks = [each.row_chunk[rows] for each, rows in zip(plans, chosen, strict=True)]
        assert np.array_equal(*chunks)
        assert small[chosen[0]].sum() == small.sum(), "small leaves are in every share"
        large = chosen[0][~small[chosen[0]]]
        assert plans[0].row_payload[large].sum() <= SHARE_NBYTES + 16 * MIB
        seen.update(chunks[0].tolist())
    assert len(seen) == plans[0].arrays.chunk_count
