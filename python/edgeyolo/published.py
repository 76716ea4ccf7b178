"""Published folders: whole, checked models that a running application takes over.

    DIR/current                            ids of versions, one a line: the one to load, then those to fall back to
    DIR/versions/ID/manifest.json          what the version is made of: files, digests, names, verification
    DIR/versions/ID/manifest.sig           optional: its Ed25519 signature, 64 bytes
    DIR/versions/ID/model.engine, ...      the models, in the manifest's order of preference

A version never changes. Its id is the digest of manifest and signature, and the manifest holds the digest of every
model: a byte that changed anywhere is found before anything is deserialized. A digest proves that a version is whole,
not who made it; that is what the signature is for. Whoever can write `current` can still choose among signed versions.
`tools/publish.py` writes these folders, this module only reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PosixPath
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, get_args

from .errors import EngineError, InvalidInput, ManifestError
from .head import HeadKind
from .manifest import ModelFacts, facts_from_header

__all__ = [
    "CURRENT",
    "FORMAT",
    "ID",
    "MANIFEST",
    "SIGNATURE",
    "VERSIONS",
    "Content",
    "Manifest",
    "PublicKey",
    "PublishedModel",
    "Require",
    "Version",
    "is_published",
    "open_version",
    "parse_manifest",
    "read_current",
    "version_id",
]

FORMAT = 1
CURRENT, VERSIONS, MANIFEST, SIGNATURE = "current", "versions", "manifest.json", "manifest.sig"
SUFFIXES = {"tensorrt": (".engine", ".plan"), "tensorrt-rtx": (".engine", ".plan"), "onnx": (".onnx",)}
MAX_CURRENT, MAX_MANIFEST, MAX_MODELS, SIGNATURE_BYTES = 16 << 10, 1 << 20, 16, 64
ID = re.compile(r"[0-9a-f]{32}")
SHA256 = re.compile(r"[0-9a-f]{64}")
# One name in one folder, on any file system: no separator, no "..", nothing hidden.
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
BLOCK = 1 << 20

T = TypeVar("T")

Require = Literal["executed", "verified", "intact"]
"""What a model must have on record to be loaded. "executed": this very file was run and compared with its reference;
"verified": it, or the graph that it was built from, was; "intact": nothing beyond its digest."""

PublicKey = str | os.PathLike[str] | bytes
"""An Ed25519 public key: the path of a PEM file, or its content."""


@dataclass(frozen=True)
class PublishedModel:
    """One model of a version. passed: whether verification passed, None where there is no record of one."""

    file: str
    sha256: str
    bytes: int
    kind: str
    precision: str
    passed: bool | None
    statement: str
    failures: tuple[str, ...]

    def lacks(self, require: Require) -> str:
        """What is missing for `require`; empty when nothing is."""
        if require == "intact":
            return ""
        if self.passed is None:
            return "there is no record of a verification"
        if not self.passed:
            return f"its verification failed: {'; '.join(self.failures) or 'no reason on record'}"
        # An ONNX file is itself the graph that was run; an engine is something else than its graph.
        if require == "executed" and self.kind != "onnx" and self.statement != "engine verified":
            return f"this file was not run when it was made: {self.statement!r}"
        return ""


@dataclass(frozen=True)
class Manifest:
    """facts: class names, (height, width), stride. record: all of it, as JSON values."""

    models: tuple[PublishedModel, ...]
    facts: ModelFacts
    head: HeadKind
    record: Mapping[str, Any]


class Content(PosixPath):
    """The path of a checked copy in memory, under the name of the file that was copied. It goes with this object.

    What is loaded from it is what was checked, whatever happens to the file in the meantime.
    """

    original = ""

    @property
    def name(self) -> str:
        return self.original


@dataclass(frozen=True)
class Version:
    """An open version. folder: its path. signature: "checked", "not checked" (nobody gave a key) or "none"."""

    id: str
    folder: Path
    manifest: Manifest
    signature: str
    _handle: int

    def check(self) -> None:
        """Reads every model once. Raises ManifestError, naming the file, for one that is not what was published."""
        for model in self.manifest.models:
            for _ in self._blocks(model):
                pass

    def content(self, model: PublishedModel) -> Content:
        """A copy of the model in memory, checked while it is copied. Raises EngineError where there is no room."""
        try:
            handle = os.memfd_create(model.file, os.MFD_CLOEXEC)
            path = Content(f"/proc/self/fd/{handle}")
            path.original = model.file
            weakref.finalize(path, os.close, handle)
            for block in self._blocks(model):
                rest = memoryview(block)
                while rest:
                    rest = rest[os.write(handle, rest) :]
        except OSError as error:
            raise EngineError(f"{model.file}: no memory for a copy of its {model.bytes} bytes: {error}") from error
        return path

    def _blocks(self, model: PublishedModel) -> Iterator[bytes]:
        """The model's content. Raises ManifestError at the end when it was not that."""
        where = self.folder / model.file
        value = hashlib.sha256()
        with opened(self._handle, model.file, where) as handle:
            size = os.fstat(handle).st_size
            if size != model.bytes:
                raise ManifestError(f"{where}: expected {model.bytes} bytes, found {size}; publish it again")
            left = size
            while left and (block := os.read(handle, min(BLOCK, left))):
                value.update(block)
                left -= len(block)
                yield block
        if value.hexdigest() != model.sha256:
            raise ManifestError(
                f"{where}: it is not the file that was published: expected SHA-256 {model.sha256}, found "
                f"{value.hexdigest()}; publish it again"
            )


def is_published(path: Path) -> bool:
    """Whether a path is meant to be a published folder, whole or not."""
    return path.is_dir() and ((path / CURRENT).is_file() or (path / VERSIONS).is_dir())


def read_current(folder: Path) -> tuple[str, ...]:
    """Ids of versions: the one to load first, then those that were current before it, latest first."""
    where = folder / CURRENT
    try:
        with opened(None, str(where), where) as handle:
            lines = read_at_most(handle, MAX_CURRENT, where).decode("ascii").split()
    except UnicodeDecodeError:
        lines = []
    # A damaged line hides no other: the versions themselves are checked by their ids.
    if not any(ID.fullmatch(line) for line in lines):
        raise ManifestError(f"{where}: expected the id of a version, 32 hexadecimal digits; publish the model again")
    return tuple(dict.fromkeys(lines))


def version_id(manifest: bytes, signature: bytes | None) -> str:
    return hashlib.sha256(manifest + (signature or b"")).hexdigest()[:32]


@contextlib.contextmanager
def open_version(folder: Path, version: str, *, public_key: PublicKey | None = None) -> Iterator[Version]:
    """Opens one version of a published folder; its manifest is checked, its models are not yet: see Version.check().

    public_key: the manifest must be signed with its private half. Raises ManifestError, naming the file, for what is
    missing, changed, unsigned or malformed; InvalidInput for a key that is none.
    """
    if not ID.fullmatch(version):
        raise ManifestError(f"{folder / CURRENT}: expected the id of a version, found {shown(version)}")
    place = folder / VERSIONS / version
    try:
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ManifestError(f"{place}: expected the folder of a version: {error.strerror}; {cure(error)}") from None
    try:
        where = place / MANIFEST
        with opened(handle, MANIFEST, where) as file:
            text = read_at_most(file, MAX_MANIFEST, where)
        signature = read_signature(handle, place)
        found = version_id(text, signature)
        if found != version:
            both = MANIFEST if signature is None else f"{MANIFEST} or {SIGNATURE}"
            raise ManifestError(
                f"{where}: {both} is not what was published: expected the digest {version}, found {found}"
            )
        told = "none" if signature is None else "not checked"
        if public_key is not None:
            check_signature(text, signature, public_key, place)
            told = "checked"
        yield Version(version, place, parse_manifest(text, str(where)), told, handle)
    finally:
        os.close(handle)


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Raises ManifestError, which begins with `where` and names the entry."""
    if len(text) > MAX_MANIFEST:
        raise ManifestError(f"{where}: expected at most {MAX_MANIFEST} bytes, found {len(text)}")
    record = json_value(text, where)
    if not isinstance(record, dict):
        raise ManifestError(f"{where}: expected a JSON object, found {shown(record)}")
    if type(record.get("format")) is not int or record["format"] != FORMAT:
        raise ManifestError(
            f"{where}: expected format {FORMAT}, found {shown(record.get('format'))}; update edgeyolo or publish again"
        )
    words = f"a list of 1 to {MAX_MODELS} models"
    entries = field(record, "models", list, words, where, lambda models: 1 <= len(models) <= MAX_MODELS)
    models = tuple(published_model(entry, f"{where}: models[{index}]") for index, entry in enumerate(entries))
    names = [model.file.lower() for model in models]  # FAT knows no case
    if len(set(names)) != len(names):
        raise ManifestError(f"{where}: 'models' names a file twice: {', '.join(names)}")
    kinds = get_args(HeadKind)
    head = field(record, "head", str, f"one of {', '.join(kinds)}", where, lambda head: head in kinds)
    try:
        facts = facts_from_header({key: record.get(key) for key in ("names", "imgsz", "stride")})
    except ManifestError as error:
        raise ManifestError(f"{where}: {error}") from None
    for name in ("names", "imgsz"):
        if getattr(facts, name) is None:
            raise ManifestError(f"{where}: it states no {name!r}")
    return Manifest(models, facts, cast(HeadKind, head), MappingProxyType(record))


def published_model(entry: Any, where: str) -> PublishedModel:
    if not isinstance(entry, dict):
        raise ManifestError(f"{where}: expected a JSON object, found {shown(entry)}")
    kind = field(entry, "kind", str, f"one of {', '.join(SUFFIXES)}", where, lambda kind: kind in SUFFIXES)
    file = field(
        entry,
        "file",
        str,
        f"a plain file name that ends in {' or '.join(SUFFIXES[kind])}",
        where,
        lambda name: bool(FILE_NAME.fullmatch(name)) and name.endswith(SUFFIXES[kind]),
    )
    sha256 = field(entry, "sha256", str, "64 hexadecimal digits", where, lambda value: bool(SHA256.fullmatch(value)))
    size = field(entry, "bytes", int, "a number of bytes above 0", where, lambda value: value > 0)
    precision = field(entry, "precision", str, "text such as 'fp16'", where)
    record = entry.get("verification")
    if record is None:
        return PublishedModel(file, sha256, size, kind, precision, None, "", ())
    verification = field(entry, "verification", dict, "a JSON object or null", where)
    where += ".verification"
    return PublishedModel(
        file,
        sha256,
        size,
        kind,
        precision,
        field(verification, "passed", bool, "true or false", where),
        field(verification, "statement", str, "text", where),
        tuple(map(str, field(verification, "failures", list, "a list of texts", where))),
    )


def field(
    record: Mapping[str, Any],
    key: str,
    kind: type[T],
    words: str,
    where: str,
    good: Callable[[T], bool] = lambda value: True,
) -> T:
    """An entry that must be there, of exactly this type (JSON's true is no 1)."""
    value = record.get(key)
    if type(value) is not kind or not good(value):
        raise ManifestError(f"{where}: {key!r} must be {words}, found {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value in a message: what a hostile file holds may be long."""
    return repr(value)[:80]


def json_value(text: bytes, where: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) != len(items):  # two readers could take different ones
            raise ValueError("a key is there twice")
        return value

    def constant(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: it is no JSON: {error}") from None


def check_signature(text: bytes, signature: bytes | None, public_key: PublicKey, place: Path) -> None:
    """Raises ManifestError when the manifest is not signed with this key, EngineError without `cryptography`."""
    if signature is None:
        raise ManifestError(f"{place / SIGNATURE}: a public key was given, and the version is not signed")
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise EngineError(
            "checking a signature needs the package cryptography, and it is not installed: pip install cryptography"
        ) from None
    name = "public_key" if isinstance(public_key, bytes) else str(public_key)
    try:
        key = load_pem_public_key(public_key if isinstance(public_key, bytes) else Path(public_key).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(f"{name}: expected an Ed25519 public key in a PEM file: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInput(f"{name}: expected an Ed25519 public key, found {type(key).__name__}")
    try:
        key.verify(signature, text)
    except InvalidSignature:
        raise ManifestError(f"{place / SIGNATURE}: {MANIFEST} was not signed with the key {name}") from None


def read_signature(handle: int, place: Path) -> bytes | None:
    where = place / SIGNATURE
    try:
        os.stat(SIGNATURE, dir_fd=handle, follow_symlinks=False)
    except FileNotFoundError:
        return None
    with opened(handle, SIGNATURE, where) as file:
        signature = read_at_most(file, SIGNATURE_BYTES, where)
    if len(signature) != SIGNATURE_BYTES:
        raise ManifestError(f"{where}: expected {SIGNATURE_BYTES} bytes, found {len(signature)}")
    return signature


def cure(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"let user {os.getuid()} read it, or publish with a umask that does (022)"
    return "publish it again"


@contextlib.contextmanager
def opened(folder: int | None, name: str, where: Path) -> Iterator[int]:
    """A regular file for reading, by its name in an open folder. A symbolic link leads out of it and is refused."""
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise ManifestError(f"{where}: expected a file: {error.strerror}; {cure(error)}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ManifestError(f"{where}: expected a file, found something else (a folder, a pipe, a device)")
        yield handle
    except OSError as error:
        raise ManifestError(f"{where}: it cannot be read: {error.strerror}") from error
    finally:
        os.close(handle)


def read_at_most(handle: int, most: int, where: Path) -> bytes:
    parts: list[bytes] = []
    while (left := most + 1 - sum(map(len, parts))) and (part := os.read(handle, left)):
        parts.append(part)
    data = b"".join(parts)
    if len(data) > most:
        raise ManifestError(f"{where}: expected at most {most} bytes, found more")
    return data
