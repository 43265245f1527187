"""What callers pass, checked in their thread before anything is begun."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from asyncckpt.errors import UsageError
from asyncckpt.options import step_number
from asyncckpt.reports import Progress

T = TypeVar("T")

MAX_METADATA_NBYTES = 16 << 20
"""User metadata travels in the record, which every listing reads."""

logger = logging.getLogger("asyncckpt")


def number_of(step: object) -> tuple[str, int]:
    """Name and number of a step."""
    number = step_number(step)
    return str(number), number


def typed(name: str, value: Any, kind: type[T], default: T | None = None) -> T:
    """The value, which is of that kind; for None the default, or one made without arguments."""
    if value is None:
        return kind() if default is None else default
    if not isinstance(value, kind):
        raise UsageError(f"{name}={value!r}: pass {kind.__name__}(...)", found=value)
    return value


def check_keep(keep: object) -> None:
    """This is a retention policy, or None."""
    if keep is not None and not callable(getattr(keep, "keep", None)):
        raise UsageError(f"keep={keep!r}: pass a retention policy such as KeepLast(3)")


def check_coordinator(coordinator: object) -> None:
    """The process saves alone, and is not one of a job of several."""
    if coordinator == "single":
        return
    if coordinator != "auto":
        raise UsageError(
            f"coordinator={coordinator!r}: this release saves from one process; pass "
            '"auto" or "single"'
        )
    # A job of several processes that each wrote the whole state to one root would be a race.
    size = os.environ.get("WORLD_SIZE", "1")  # noqa: TID251 - set by torchrun, not a knob of ours
    if size.isdigit() and int(size) > 1:
        raise UsageError(
            f"WORLD_SIZE={size}: this release saves from one process; call it on rank 0 only, "
            'with coordinator="single"'
        )


def checked_metadata(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A copy of the metadata as JSON makes it."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata={metadata!r:.80}: pass a dict of JSON values", found=metadata)
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
        copy: Mapping[str, Any] = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"metadata is not JSON ({error}); pass dicts, lists, strings, finite numbers, booleans "
            "and None"
        ) from None
    if len(text) > MAX_METADATA_NBYTES:
        raise UsageError(
            f"metadata takes {len(text)} bytes, more than {MAX_METADATA_NBYTES}; save it as leaves"
        )
    return copy


def checked_metrics(metrics: Mapping[str, float] | None) -> Mapping[str, float]:
    """The metrics, as floats by name."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics={metrics!r:.80}: pass a dict of numbers", found=metrics)
    result = {}
    for name, value in metrics.items():
        try:
            if not isinstance(name, str):
                raise TypeError("its name is no string")
            result[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"metrics[{name!r}]={value!r:.80}: {error}; pass numbers") from None
    return result


def checked_globs(include: str | Sequence[str] | None) -> Sequence[str] | None:
    """The globs of `include`, a single one too; None for all."""
    if include is None:
        return None
    globs = [include] if isinstance(include, str) else list(include)
    if not all(isinstance(glob, str) for glob in globs):
        raise UsageError(f"include={include!r}: pass a glob on paths, or several")
    if not globs:
        raise UsageError(
            f"include={include!r} selects nothing; pass a glob on paths, or several, or None for "
            "all leaves",
            found=include,
        )
    return globs


def guarded(
    progress: Callable[[Progress], None] | None,
) -> Callable[[Progress], None] | None:
    """The callback, which cannot break a save: after its first error, logged, it is left alone."""
    if progress is None:
        return None
    if not callable(progress):
        raise UsageError(f"progress={progress!r}: pass a function of one Progress")
    broken = False

    def guarded(state: Progress) -> None:
        nonlocal broken
        if broken:
            return
        try:
            progress(state)
        except Exception:
            broken = True
            logger.exception("the progress callback failed and is not called again")

    return guarded
