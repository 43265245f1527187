"""`--storage-option`: options of object-store clients on the command line."""

# Rule: no value, nor any text that may be one, is ever printed: it may be a secret.

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from asyncckpt.errors import UsageError

StorageOption = Annotated[
    list[str],
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Option of the client of a URL, such as endpoint_url=…; JSON or text; repeatable.",
    ),
]


def storage_options(words: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the options by key; None for no words.

    A value that is JSON is parsed; every other one is text.

    Raises:
        UsageError: a word is not KEY=VALUE, or a key comes twice.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key.isidentifier():
            raise UsageError("--storage-option: pass KEY=VALUE, for example profile=training")
        if key in options:
            raise UsageError(f"--storage-option: {key} is given twice", found=key)
        try:
            options[key] = json.loads(text)
        except (ValueError, RecursionError):
            options[key] = text
    return options or None
