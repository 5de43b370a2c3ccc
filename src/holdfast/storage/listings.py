"""Reads and writes the XML that object stores answer with and ask for; what may be cut short is
refused.
"""

from __future__ import annotations

import urllib.parse
import xml.etree.ElementTree as xml
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime

from holdfast.errors import StorageError


def escaped(text: str) -> str:
    """Returns a text as it stands in a document."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def following_of(
    page: xml.Element, query: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, str]:
    """Returns what to ask for the page after this one; nothing where it is the last. ``names``: of
    the markers in the answer, by those of the query.
    """
    if text_of(page, "IsTruncated") != "true":
        return {}
    found = {asked: text_of(page, name) for asked, name in names.items()}
    if "key-marker" in found:
        found["key-marker"] = decoded(found["key-marker"])
    if not any(found.values()) or all(query.get(asked) == one for asked, one in found.items()):
        raise StorageError("the server's list is cut short, and does not say where it goes on")
    return found


def parsed(body: bytes, root: str = "") -> xml.Element:
    """Returns a document without its namespaces. ``root``: the tag that it must have."""
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        raise StorageError("the server's answer declares entities, as none of an object store does")
    try:
        found = xml.fromstring(body)
    except xml.ParseError as error:
        raise StorageError(f"the server's answer is no XML of an object store: {error}") from None
    for element in found.iter():
        element.tag = element.tag.rpartition("}")[2]
    if root and found.tag != root:
        raise StorageError(f"the server's answer is no {root}, but {found.tag[:40]!r}")
    return found


def text_of(element: xml.Element, name: str) -> str:
    """Returns the text of an element below this one; "" for none."""
    return element.findtext(name) or ""


def tag_of(element: xml.Element, tag: str, size: str) -> str:
    """Returns the tag and the size of a listed object as one text; "" where one is missing."""
    found = text_of(element, tag).strip('"'), text_of(element, size)
    return ":".join(found) if all(found) else ""


def age_s(made: str, now: str) -> float:
    """Returns the seconds between the moment that a list gives and that of its answer; 0 where one
    is none.
    """
    try:
        if made.endswith("GMT"):
            return (parsedate_to_datetime(now) - parsedate_to_datetime(made)).total_seconds()
        return (parsedate_to_datetime(now) - datetime.fromisoformat(made)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def decoded(key: str) -> str:
    """Returns a key that a list has encoded as in a URL."""
    return urllib.parse.unquote_plus(key)


def decoded_percent(key: str) -> str:
    """Returns a key that a list has encoded, but for its "+"."""
    return urllib.parse.unquote(key)


def next_marker(page: xml.Element, asked: str) -> str:
    """Returns the marker of the page after this one of a list of Azure; "" where it is the last."""
    if page.find("NextMarker") is None:
        raise StorageError("the server's list is cut short, and does not say where it goes on")
    found = text_of(page, "NextMarker")
    if found and found == asked:
        raise StorageError("the server's list goes on where it began")
    return found
