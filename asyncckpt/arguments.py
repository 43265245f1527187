"""Arguments of the public functions, declared once and checked before any work begins."""

from __future__ import annotations

import functools
import inspect
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    SupportsFloat,
    TypedDict,
    TypeGuard,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from asyncckpt.errors import UsageError
from asyncckpt.log import logger
from asyncckpt.options import (
    MAX_DEPTH,
    STEP_MAX,
    RestoreOptions,
    SaveOptions,
    check_function,
    check_seconds,
)
from asyncckpt.reports import Progress, RestoreReport
from asyncckpt.retention import Retention, is_policy

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Location = str | os.PathLike[str]
"""Path or URL of a checkpoint, a run, a file."""

Leaves = Literal["numpy", "jax", "torch"]

ProgressCallback = Callable[[Progress], None]

MAX_METADATA_NBYTES = 16 << 20
"""User metadata is stored in the record, which every listing reads."""

COORDINATOR_METHODS = ("put", "put_once", "look", "wait", "list", "delete", "close")
"""Methods of `ports.Coordinator`, which this module must not import."""

# ----------------------------------------------------------- arguments that several functions share

# Each is declared once, here. The second item of `Annotated` is its default; the others default to
# None. `documented` lists them one by one in signatures, `completed` fills in the defaults.


class RunArguments(TypedDict, total=False):
    """Arguments of a `Checkpointer`."""

    keep: Retention | None
    save_options: SaveOptions | None
    restore_options: RestoreOptions | None
    storage_options: Mapping[str, Any] | None
    coordinator: Annotated[object, "auto"]
    preemption: Annotated[bool, False]
    grace_s: float | None
    takeover: Annotated[bool, False]


class LocationArguments(TypedDict, total=False):
    """Arguments of the one-shot functions about a location."""

    storage_options: Mapping[str, Any] | None
    coordinator: Annotated[object, "auto"]


class SaveArguments(TypedDict, total=False):
    """Arguments of every save."""

    metadata: Mapping[str, Any] | None
    overwrite: Annotated[bool, False]
    options: SaveOptions | None
    progress: ProgressCallback | None


class StepSaveArguments(SaveArguments, total=False):
    """Arguments of saves of steps."""

    metrics: Mapping[str, SupportsFloat] | None


class LocationSaveArguments(SaveArguments, LocationArguments, total=False):
    """Arguments of one-shot saves."""


class RestoreIntoArguments(TypedDict, total=False):
    """Arguments of every restore."""

    include: str | Sequence[str] | None
    strict: Annotated[bool, True]
    cast: Annotated[bool, False]
    options: RestoreOptions | None
    progress: ProgressCallback | None


class RestoreArguments(RestoreIntoArguments, total=False):
    """Arguments of restores that return a tree."""

    leaves: Annotated[Leaves, "numpy"]
    on_report: Callable[[RestoreReport], object] | None


class LocationRestoreArguments(RestoreArguments, LocationArguments, total=False):
    """Arguments of one-shot restores that return a tree."""


class LocationRestoreIntoArguments(RestoreIntoArguments, LocationArguments, total=False):
    """Arguments of one-shot restores into a tree."""


class ConvertArguments(SaveArguments, total=False):
    """Arguments of `convert` and `export`."""

    storage_options: Mapping[str, Any] | None


@functools.cache
def _declared(arguments: type) -> Mapping[str, inspect.Parameter]:
    parameters = {}
    for name, hint in get_type_hints(arguments, include_extras=True).items():
        annotated = get_origin(hint) is Annotated
        parameters[name] = inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=hint.__metadata__[0] if annotated else None,
            annotation=hint.__origin__ if annotated else hint,
        )
    return parameters


def documented(function: F) -> F:
    """List the arguments behind `**arguments: Unpack[...]` one by one in the signature."""
    shared = get_args(get_type_hints(function)["arguments"])[0]
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    expanded = signature.replace(parameters=[*own, *_declared(shared).values()])
    function.__signature__ = expanded  # type: ignore[attr-defined]
    return function


def completed(shared: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given arguments, with defaults for the rest.

    Raises:
        TypeError: there is no argument of this name.
        UsageError: a switch is neither True nor False.
    """
    declared = _declared(shared)
    for name in given:
        if name not in declared:
            raise TypeError(
                f"unexpected keyword argument {name!r}; the optional ones are {', '.join(declared)}"
            )
        if declared[name].annotation is bool:
            check_switch(name, given[name])
    return {name: given.get(name, parameter.default) for name, parameter in declared.items()}


# ------------------------------------------------------------------------------------------ checks

_LOST_SLASH = re.compile(
    r"(s3|s3a|s3n|gs|gcs|az|abfs|abfss|adl|https?|memory|file|local):/(?!/)", re.IGNORECASE
)
"""A URL that has lost a slash in a path object."""

_NEVER_IN_PATHS = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""Null bytes, and surrogates that do not stand for bytes of a path."""


def check_path(location: Location) -> None:
    """Check a path or URL.

    Raises:
        UsageError: it is empty, has a null byte, begins with ``~``, or is a URL in a path object.
    """
    text = os.fsdecode(location)
    if (found := _LOST_SLASH.match(text)) is not None:
        if set("@:%?#") & set(text[found.end() :]):  # possibly credentials
            text = f"{found.group()}…"
        raise UsageError(
            f"{text}: looks like a URL ({found.group(1)}://) that has lost a slash, as "
            "a pathlib.Path loses it; pass the URL as a str, or an absolute path",
            found=text,
        )
    if text.partition("/")[0] == "~":
        raise UsageError(
            f"{text}: ~ is not expanded; pass os.path.expanduser({location!r})", found=text
        )
    if not text:
        raise UsageError("location='': pass the path of a directory, or a URL")
    if (bad := _NEVER_IN_PATHS.search(text)) is not None:
        raise UsageError(f"{text!a}: no path can hold {bad[0]!a}; pass another name", found=text)


_TO_LAST_UP = re.compile(r"(.*/)?\.\.(/+|\Z)", re.DOTALL)
"""A path up to its last ``..``."""


def absolute(path: Location) -> str:
    """Return the absolute path, because the program may change its working directory later.

    As in system calls, `link/..` is the parent of the link's target.

    Raises:
        UsageError: the path is relative, and the working directory does not exist any more.
    """
    text = os.fsdecode(path)
    try:
        if (found := _TO_LAST_UP.match(text)) is not None:
            text = os.path.join(os.path.realpath(found[0]), text[found.end() :])
        return os.path.abspath(text)
    except FileNotFoundError:
        raise UsageError(
            f"{text}: this path is relative, and the working directory was removed; "
            "pass an absolute path",
            found=text,
        ) from None


def as_int(number: Any) -> Any:
    """Return an integer of any type, such as NumPy's, as an int; return other values unchanged."""
    if isinstance(number, bool):
        return number
    try:
        return operator.index(number)
    except TypeError:
        return number


def _is_int(number: object) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool)


def step_number(step: object) -> int:
    """Return the step as an int.

    Raises:
        UsageError: it is not a non-negative integer of at most 19 digits.
    """
    number = as_int(step)
    if not _is_int(number):
        raise UsageError(
            f"step={step!r:.80}: a step is a non-negative integer, not {type(step).__name__}; "
            "it comes first, as in save(step, tree), and a target is passed as restore(like=...)",
            expected="a non-negative integer",
            found=step,
        )
    if not 0 <= number <= STEP_MAX:
        raise UsageError(
            f"step={number}: a step is a non-negative integer of at most 19 digits",
            expected=f"0 <= step <= {STEP_MAX}",
            found=number,
        )
    return number


def typed(name: str, value: Any, kind: type[T], default: T | None = None) -> T:
    """Check the type of a value and return it; for None return the default, or `kind()`."""
    if value is None:
        return kind() if default is None else default
    if not isinstance(value, kind):
        # Not the value: these may be storage options with credentials, or a whole state.
        found = type(value).__name__
        raise UsageError(f"{name}= is of type {found}: pass {kind.__name__}(...)", found=found)
    return value


def check_keep(keep: object) -> None:
    """Check that this is a retention policy, or None."""
    if keep is not None and not is_policy(keep):
        raise UsageError(
            f"keep={keep!r:.80}: pass a retention policy such as KeepLast(3), or an object with an "
            "ordinary method keep(steps, metrics)",
            found=keep,
        )


def check_switch(name: str, value: object) -> None:
    """Check that this is True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r:.80}: pass True or False", found=value)


def check_preemption(preemption: bool, grace_s: object) -> None:
    """Check the arguments about preemption."""
    check_seconds("grace_s", grace_s)
    if grace_s is not None and not preemption:
        raise UsageError(
            f"grace_s={grace_s!r} without preemption=True: it says how long the program has after "
            "a notice of preemption; pass both, or neither",
            found=grace_s,
        )


def check_coordinator(coordinator: object) -> None:
    """Check that this is ``"auto"``, ``"single"`` or an object like `ports.Coordinator`.

    The processes of a job are found later, at first use, by `coordinators.choice`.
    """
    if coordinator in ("auto", "single"):
        return
    missing = [m for m in COORDINATOR_METHODS if not callable(getattr(coordinator, m, None))]
    named = isinstance(getattr(coordinator, "name", None), str)
    if missing or not named or isinstance(coordinator, type):
        lacking = (
            f"; it has no method {', '.join(missing)}"
            if 0 < len(missing) < len(COORDINATOR_METHODS)
            else ""
        )
        raise UsageError(
            f'coordinator={coordinator!r:.80}: pass "auto", "single", or a coordinator such as '
            f"DirectoryCoordinator(path, process_index=..., process_count=...){lacking}",
            found=coordinator,
        )
    index = getattr(coordinator, "process_index", None)
    count = getattr(coordinator, "process_count", None)
    if not (_is_int(index) and _is_int(count) and 0 <= index < count):
        raise UsageError(
            f"coordinator={coordinator!r:.80}: process_index={index!r} of process_count={count!r}: "
            "pass a number of processes, and an index from 0 to one below it",
            expected="0 <= process_index < process_count",
            found=(index, count),
        )


def checked_metadata(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a copy of the metadata, encoded as JSON and decoded again."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata={metadata!r:.80}: pass a dict of JSON values", found=metadata)
    _check_json(dict(metadata))
    text = _as_json(dict(metadata)).encode()
    if len(text) > MAX_METADATA_NBYTES:
        raise UsageError(
            f"metadata takes {len(text)} bytes, more than {MAX_METADATA_NBYTES}; save it as leaves"
        )
    copy: Mapping[str, Any] = json.loads(text)
    return copy


# Strings that UTF-8 cannot encode (lone surrogates) would fail when the record is written.
_as_json = functools.partial(json.dumps, allow_nan=False, ensure_ascii=False)


def _check_json(value: Any, place: str = "metadata", depth: int = 1) -> None:
    """Check that JSON gives the value back as it is, and that records may be nested so deeply."""
    if not isinstance(value, (dict, list, tuple)):
        try:
            if type(value) is not float or not math.isfinite(value):
                _as_json(value).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{place} is not JSON ({error}); pass dicts, lists, strings, finite numbers, "
                "booleans and None"
            ) from None
        return
    if depth > MAX_DEPTH:
        raise UsageError(
            f"metadata is nested deeper than {MAX_DEPTH} containers; save it as leaves",
            expected=MAX_DEPTH,
        )
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        # JSON would turn other keys into strings, and 1 and "1" into one key.
        if isinstance(value, dict) and not isinstance(key, str):
            raise UsageError(
                f"{place} has the key {key!r:.80}; keys are strings: pass str(key)", found=key
            )
        where = f"{place}[{key!r:.80}]"
        _check_json(key, f"the key of {where}")
        _check_json(item, where, depth + 1)


def checked_metrics(metrics: Mapping[str, SupportsFloat] | None) -> Mapping[str, float]:
    """Return the metrics as floats by name."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics={metrics!r:.80}: pass a dict of numbers", found=metrics)
    result = {}
    for name, value in metrics.items():
        try:
            if not isinstance(name, str):
                raise TypeError("its name is not a string")
            name.encode()
            # `item` turns arrays, and tensors with gradients, into numbers without a warning.
            item = getattr(value, "item", None)
            result[name] = float(item() if callable(item) else value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UsageError(f"metrics[{name!r}]={value!r:.80}: {error}; pass numbers") from None
    return result


def checked_globs(include: str | Sequence[str] | None) -> Sequence[str] | None:
    """Return the globs of `include`; None for all leaves."""
    if include is None:
        return None
    several = isinstance(include, Iterable) and not isinstance(include, str)
    globs: list[Any] = list(include) if several else [include]
    if not all(isinstance(glob, str) for glob in globs):
        raise UsageError(f"include={include!r}: pass a glob on paths, or several")
    if not globs:
        raise UsageError(
            f"include={include!r} selects nothing; pass a glob on paths, or several, or None for "
            "all leaves",
            found=include,
        )
    return globs


class ProgressGuard:
    """Wrapper of a user's progress callback, whose errors do not fail the work.

    Its first error is logged; after that it is not called again.

    Attributes:
        error: the error that it raised.
    """

    def __init__(self, progress: ProgressCallback) -> None:
        self._progress = progress
        self.error: BaseException | None = None

    def __call__(self, state: Progress) -> None:
        """Call the callback, unless it has failed before."""
        if self.error is not None:
            return
        try:
            self._progress(state)
        except BaseException as error:  # even sys.exit(), which would end the engine's thread
            self.error = error
            logger.exception("the progress callback failed and is not called again")


def guarded(progress: ProgressCallback | None) -> ProgressCallback | None:
    """Return the callback as a `ProgressGuard`."""
    check_function("progress", progress, "one Progress")
    return None if progress is None else ProgressGuard(progress)


def progress_notes(progress: ProgressCallback | None) -> tuple[str, ...]:
    """Return notes for a report about a callback returned by `guarded`."""
    if not isinstance(progress, ProgressGuard) or progress.error is None:
        return ()
    error = progress.error
    return (
        f"the progress callback raised {type(error).__name__}: {error}; it was not called again",
    )


COLLECT_MIN_S = 7 * 24 * 3600.0
"""Minimum age of removed leftovers in seconds: no save takes a week, and one that is older than
half a week is no longer committed."""


def check_age(seconds: float, given: str) -> None:
    """Check the age of leftovers to remove; `given` is the argument."""
    if not seconds >= COLLECT_MIN_S:  # NaN neither
        raise UsageError(
            f"{given}: pass at least a week (7d, {COLLECT_MIN_S:.0f} s); younger leftovers may "
            "belong to a save that is still running",
            expected=COLLECT_MIN_S,
            found=seconds,
        )
