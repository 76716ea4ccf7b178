"""Addresses as they may be shown: without passwords, tokens and keys. What is shown too little of is no harm, so where
an address can be read in two ways the longer password is taken out."""

from __future__ import annotations

import re

__all__ = ["STREAM_SCHEMES", "redacted"]

STREAM_SCHEMES = ("http", "https", "rtmp", "rtmps", "rtp", "rtsp", "rtsps", "srt", "tcp", "udp")

# The beginning of an address, also of one whose // or : were lost (a Path has one / left).
BEGIN = re.compile(rf"(?:[a-z][a-z0-9+.-]*:/+|(?:{'|'.join(STREAM_SCHEMES)})//+)", re.IGNORECASE)
INSIDE = re.compile(rf"(://|\b(?:{'|'.join(STREAM_SCHEMES)}):/+)", re.IGNORECASE)
QUOTED = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
WORD = re.compile(rf"(?:{QUOTED}|\\.|[^\s\\])+")  # of a pipeline, as GStreamer reads it
NAME = r"[\w-]*(?:pas(?:s\w*)?|pwd?|key|token|jwt|secret|sig(?:nature)?|auth\w*|credential|sid)"
IN_ADDRESS = re.compile(rf"({NAME}=)[^&;#]+", re.IGNORECASE)
IN_PIPELINE = re.compile(rf"({NAME}\s*=\s*)(?:{QUOTED}|(?:\\.|[^\s&;#\\])+)", re.IGNORECASE)


def redacted(text: str) -> str:
    """An address, a pipeline, or a sentence that holds addresses, for messages and logs. Other texts stay."""
    begin = BEGIN.match(text)
    if begin is not None and " ! " not in text:
        return IN_ADDRESS.sub(r"\1***", begin[0] + _without_passwords(text[begin.end() :]))
    if " ! " in text or INSIDE.search(text):
        shown = WORD.sub(lambda word: _without_passwords(word[0]), text)
        return IN_PIPELINE.sub(r"\1***", shown)
    if re.match(r"[^/:@\s]+:[^@]+@", text):  # a forgotten rtsp://
        return _without_passwords(text)
    return text


def _without_passwords(rest: str) -> str:
    """What follows the :// of an address, whose query may hold other addresses (proxies have that)."""
    shown = "".join(_without_password(piece) for piece in INSIDE.split(rest))
    return re.sub(r"(%3A%2F%2F)[^&\s]*%40", r"\1***%40", shown, flags=re.IGNORECASE)


def _without_password(rest: str) -> str:
    """Cameras take passwords that no address should hold, with @, : and /."""
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        before = authority.rindex("@")
    elif "@" in rest and not re.fullmatch(r"[^:]*(:[0-9]*)?|\[.*", authority):  # no host and port: a / in the password
        before = rest.rindex("@")
    else:
        return rest
    user, colon, _ = rest[:before].partition(":")
    return f"{user}{colon}***{rest[before:]}" if colon else rest
