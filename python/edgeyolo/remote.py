"""What a web server says of an address, where its video does not say how long it is."""

from __future__ import annotations

import base64
import re
from typing import Literal

__all__ = ["what_answers"]

TIMEOUT_S = 3.0
# Short texts that name the pieces of a broadcast, and pictures one after another.
LIVE_TYPES = re.compile(r"mpegurl|dash\+xml|/sdp|multipart/", re.IGNORECASE)
LIVE_NAMES = re.compile(r"\.(m3u8?|mpd|sdp)$", re.IGNORECASE)


def what_answers(address: str) -> Literal["file", "something", "nobody"]:
    """Whether an http:// or https:// address is a file: a thing of a length. By a HEAD request, without its content.

    Cameras and broadcasts, which have no length or refuse the question, are something.
    """
    # Imported here: it takes longer than the rest of the package, and few sources need it.
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import unquote, urlsplit, urlunsplit
    from urllib.request import Request, urlopen

    try:
        parts = urlsplit(address)
        user, at, host = parts.netloc.rpartition("@")
        request = Request(urlunsplit(parts._replace(netloc=host)), method="HEAD")
        if at:
            request.add_unredirected_header(
                "Authorization", "Basic " + base64.b64encode(unquote(user).encode()).decode()
            )
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            length, kind = answer.headers.get("Content-Length", ""), answer.headers.get("Content-Type", "")
            path = urlsplit(answer.url).path
    except HTTPError:
        return "something"
    except (OSError, HTTPException, ValueError):
        return "nobody"
    if not length.isdecimal() or int(length) == 0 or LIVE_TYPES.search(kind) or LIVE_NAMES.search(path):
        return "something"
    return "file"
