"""The XML documents of S3."""

from __future__ import annotations

import time
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from asyncckpt.testing.objectstore.requests import Request, Response
from asyncckpt.testing.objectstore.state import Refused

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def answer(root: str, body: str) -> Response:
    """A document with this root element."""
    return Response(200, {"Content-Type": "application/xml"}, (xml(root, body),))


def xml(root: str, body: str) -> bytes:
    """A document with this root element."""
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return f'{head}<{root} xmlns="{NAMESPACE}">{body}</{root}>'.encode()


def element(name: str, value: object) -> str:
    """One element that holds text."""
    return f"<{name}>{escape(str(value))}</{name}>"


def iso(seconds: float) -> str:
    """As S3 writes times into documents."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def document(request: Request) -> ElementTree.Element:
    """The root of the body. Raises `Refused`: it is no document."""
    try:
        return ElementTree.fromstring(bytes(request.body))
    except ElementTree.ParseError:
        raise Refused("MalformedXML") from None


def children(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """The elements of this name right below the root, whatever their namespace."""
    return [child for child in root if child.tag.rpartition("}")[2] == name]


def text(root: ElementTree.Element, name: str) -> str:
    """The text of the first such element, or nothing."""
    for child in root:
        if child.tag.rpartition("}")[2] == name:
            return child.text or ""
    return ""
