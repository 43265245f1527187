"""Names of claims and errors of lost claims, for all stores."""

from __future__ import annotations

import datetime
import os
import re
import secrets
import socket
import time

from asyncckpt.errors import FencedError, UsageError
from asyncckpt.format.claim import Claim

CLAIM = re.compile(r"claim-([1-9][0-9]{0,18})")
"""Name of a claim in the control directory."""

INHERITED = re.compile(r"inherited-([1-9][0-9]{0,18})")
"""Name of a claim's list of inherited checkpoints."""


def claim_name(epoch: int) -> str:
    """Return the name of a claim in the control directory."""
    return f"claim-{epoch}"


def inherited_name(epoch: int) -> str:
    """Return the name of a claim's list of inherited checkpoints."""
    return f"inherited-{epoch}"


def check_epoch(epoch: int) -> None:
    """Raise `UsageError` for a negative number."""
    if epoch < 0:
        raise UsageError(f"epoch={epoch}: pass a non-negative integer", found=epoch)


def new_claim(epoch: int) -> Claim:
    """Return a new claim by this process."""
    return Claim(
        epoch, secrets.token_hex(16), socket.gethostname()[:255], os.getpid(), time.time_ns()
    )


def claim_text(claim: Claim) -> str:
    """Describe who made a claim, and when."""
    made = datetime.datetime.fromtimestamp(claim.created_ns / 1e9, datetime.UTC)
    return f"process {claim.pid} on {claim.host} at {made:%Y-%m-%d %H:%M:%S} UTC by its clock"


def fenced_error(
    root: str,
    epoch: int,
    successor: Claim | None,
    *,
    location: str = "",
    visible: bool | None = False,
) -> FencedError:
    """Return the error of a process whose claim has been taken over.

    Args:
        root: path or URL of the run.
        epoch: claim of this process.
        successor: claim that took over; None if it cannot be read.
        location: checkpoint that was being saved or deleted, if any.
        visible: whether the checkpoint is part of the run; None if unknown.
    """
    if successor is None:
        who = "another process, whose claim cannot be read"
    else:
        who = f"claim {successor.epoch}, made by {claim_text(successor)}"
    what = {
        False: f"this process has not changed {location or root} since",
        True: f"{location} was published before that and is part of the run",
        None: f"that claim decides whether {location} is part of the run: look at latest_step()",
    }[visible]
    return FencedError(
        f"{root}: the claim of this process (epoch {epoch}) has ended: the run was taken over by "
        f"{who}; {what}. End this process; to continue the run here instead, restart it",
        epoch=epoch,
        claimed_by=None if successor is None else f"{successor.host}, pid {successor.pid}",
        claimed_ns=None if successor is None else successor.created_ns,
        visible=visible,
        location=location or root,
    )


def lost_error(root: str, epoch: int, winner: Claim | None) -> FencedError:
    """Return the error of a process that lost the race for a claim."""
    who = "another process" if winner is None else claim_text(winner)
    return FencedError(
        f"{root}: claim {epoch} was made by {who} while this process was about to make it: "
        "another job saves to this root. End this one; or, to continue it instead, end the other "
        "and restart it",
        epoch=epoch,
        claimed_by=None if winner is None else f"{winner.host}, pid {winner.pid}",
        claimed_ns=None if winner is None else winner.created_ns,
        location=root,
    )
