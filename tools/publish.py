"""Publishing: from the folder of an export run to a version that running applications take over.

    check the run's record > copy into a hidden folder > check the copy > rename it to its id > switch `current` > prune

Every step but the switch leaves what is current as it was, and the switch is one rename. A process killed anywhere
leaves a hidden folder at most; the next run removes it. python/edgeyolo/published.py describes the folder and reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeyolo.errors import EdgeYoloError, EngineError, InvalidInput, ManifestError
from edgeyolo.loading import check_file
from edgeyolo.published import (
    CURRENT,
    FORMAT,
    ID,
    MANIFEST,
    SIGNATURE,
    VERSIONS,
    Manifest,
    Require,
    open_version,
    parse_manifest,
    read_current,
    version_id,
)

from .files import named, read_json, umask, write_atomic

__all__ = ["Publication", "publish", "rollback", "write_keys"]

RECORD = "export.json"
LOCK = ".publish-lock"
PARTIAL = ".partial-"
BLOCK = 1 << 20
log = logging.getLogger("edgeyolo")


@dataclass(frozen=True)
class Publication:
    """version: the id of what is current now. changed: whether it was not before. previous: what rollback() returns to,
    latest first."""

    folder: Path
    version: str
    changed: bool
    previous: tuple[str, ...]


def publish(
    run: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    sign_key: str | os.PathLike[str] | None = None,
    require: Require = "verified",
    keep: int = 3,
    unsigned: bool = False,
) -> Publication:
    """Makes the models of an export run the current version of a published folder.

    run: a folder with `export.json`. to: the published folder; made when missing. sign_key: the PEM file of an Ed25519
    private key. require: what each model must have on record, as edgeyolo.load() takes it. keep: versions to keep, with
    the current one, at least 2. unsigned: allows a version without a signature after one with it, which applications
    that ask for a signature will refuse. Publishing the same run again changes nothing, or completes what was begun.

    Raises ManifestError for a run that does not hold together or lacks what is required, InvalidInput for arguments.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 2:
        raise InvalidInput(f"keep must be at least 2, the current version and one to go back to; found {keep!r}")
    source, folder = Path(run).expanduser(), Path(to).expanduser()
    text, manifest = manifest_of(source, require)
    signature = None if sign_key is None else sign(text, Path(sign_key).expanduser())
    version = version_id(text, signature)
    with locked(folder):
        sweep(folder)
        history = history_of(folder)
        if signature is None and not unsigned and history and (folder / VERSIONS / history[0] / SIGNATURE).exists():
            raise InvalidInput(
                f"{folder}: its current version is signed, and this one would not be: applications that ask for the "
                "signature would not take it. Name the key (sign_key, --sign), or allow it (unsigned=True, --unsigned)"
            )
        if not intact(folder, version):
            with staged(folder) as stage:
                for model in manifest.models:
                    copy_checked(source / model.file, stage / model.file, model.sha256)
                write_new(stage / MANIFEST, text)
                if signature is not None:
                    write_new(stage / SIGNATURE, signature)
                for model in manifest.models:
                    check_file(stage / model.file, manifest)
                sync_folder(stage)
                take_away(folder / VERSIONS / version)  # a damaged one
                stage.rename(folder / VERSIONS / version)
            sync_folder(folder / VERSIONS)
            with open_version(folder, version) as published:  # as a reader will see it
                published.check()
        rest = tuple(other for other in history or () if other != version)[: keep - 1]
        switch(folder, (version, *rest))
        if history is not None:  # else nobody knows which of the others is good
            prune(folder, {version, *rest})
        return Publication(folder, version, not history or history[0] != version, rest)


def rollback(to: str | os.PathLike[str]) -> Publication:
    """Makes the version before the current one current again; a damaged one is passed over, with a warning.

    The version that was current stays on disk until the next publish(). Raises ManifestError when there is none to go
    back to.
    """
    folder = Path(to).expanduser()
    read_current(folder)  # no published folder, no lock in it
    with locked(folder):
        history = read_current(folder)
        for place, version in enumerate(history[1:], 1):
            if intact(folder, version):
                switch(folder, history[place:])
                return Publication(folder, version, True, history[place + 1 :])
    raise ManifestError(f"{folder / CURRENT}: there is no whole version before {history[0]} to go back to")


def manifest_of(run: Path, require: Require) -> tuple[bytes, Manifest]:
    """The manifest's text and meaning. The same run gives the same text, and so the same version."""
    record = read_json(run / RECORD)
    where = str(run / RECORD)
    if not isinstance(record, dict) or not isinstance(record.get("models"), list):
        raise ManifestError(f"{where}: expected the record of an export with its 'models'")
    models = []
    for model in record["models"]:
        if not isinstance(model, dict) or not isinstance(model.get("file"), str):
            raise ManifestError(f"{where}: expected models with their 'file', found {model!r:.80}")
        path = run / model["file"]
        if path.parent != run or path.is_symlink() or not path.is_file():
            raise ManifestError(f"{where}: expected the model file {model['file']!r} in the folder of the run")
        models.append({**model, "bytes": path.stat().st_size})
    value = {**record, "format": FORMAT, "models": models}
    text = (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")
    if record.get("format") != FORMAT:
        raise ManifestError(f"{where}: expected format {FORMAT}, found {record.get('format')!r}; export again")
    manifest = parse_manifest(text, where)
    lacking = [f"{model.file}: {lack}" for model in manifest.models if (lack := model.lacks(require))]
    if lacking:
        raise ManifestError(f"{where}: not published: {'; '.join(lacking)}")
    return text, manifest


def sign(text: bytes, path: Path) -> bytes:
    """The Ed25519 signature of the manifest, 64 bytes; the same each time."""
    ed25519, serialization = cryptography()
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(f"{path}: expected an Ed25519 private key, a PEM file without password: {error}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InvalidInput(f"{path}: expected an Ed25519 private key, found {type(key).__name__}")
    signature: bytes = key.sign(text)
    return signature


def write_keys(path: Path) -> Path:
    """A new pair of keys: the private one at `path`, for its owner alone, the public one beside it with `.pub` added.

    Returns the public one's path. Raises InvalidInput rather than write over a key.
    """
    ed25519, serialization = cryptography()
    public = path.with_name(path.name + ".pub")
    for taken in (path, public):
        if os.path.lexists(taken):
            raise InvalidInput(f"{taken} is there already: choose another name")
    key = ed25519.Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_new(path, private, mode=0o600)
    write_new(public, key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return public


def cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise EngineError("signing needs the package cryptography: pip install 'edgeyolo[tools]'") from None
    return ed25519, serialization


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer at a time. The lock goes with its process."""
    if others := strangers(folder):
        raise InvalidInput(
            f"{folder} holds other things, such as {others[0]}, and is no published folder: name a new or an empty one"
        )
    (folder / VERSIONS).mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EdgeYoloError(f"{folder}: somebody else is publishing to it: try again when that is done") from None
        yield
    finally:
        os.close(handle)


def strangers(folder: Path) -> list[Path]:
    """What lies in a folder that nobody published to yet: a project may well have a folder `versions` of its own."""
    if not folder.is_dir():
        return []
    if not (folder / VERSIONS).is_dir():
        return [entry for entry in folder.iterdir() if entry.name != LOCK]
    with contextlib.suppress(ManifestError):
        read_current(folder)
        return []
    return [entry for entry in (folder / VERSIONS).iterdir() if not ours(entry)]


def ours(entry: Path) -> bool:
    """Whether something in `versions` was made here."""
    return bool(ID.fullmatch(entry.name)) or entry.name.startswith(PARTIAL)


def history_of(folder: Path) -> tuple[str, ...] | None:
    """What `current` lists; None where it is damaged, which must not keep a good model from being published."""
    if not os.path.lexists(folder / CURRENT):
        return ()
    try:
        return read_current(folder)
    except ManifestError as error:
        log.warning("%s; it is written anew, and the versions that it named are kept", error)
        return None


def intact(folder: Path, version: str) -> bool:
    if not os.path.lexists(folder / VERSIONS / version):
        return False
    try:
        with open_version(folder, version) as found:
            found.check()
    except ManifestError as error:
        log.warning("version %s is damaged and not used: %s", version, error)
        return False
    return True


def switch(folder: Path, history: tuple[str, ...]) -> None:
    """From here on readers take the first of `history`."""
    text = "".join(f"{version}\n" for version in history)
    path = folder / CURRENT
    if not path.is_file() or path.read_bytes() != text.encode():
        write_atomic(path, text)
        sync_folder(folder)


def prune(folder: Path, keep: set[str]) -> None:
    """Removes the versions that `current` no longer names, and nothing else that lies beside them. Who has loaded one
    keeps it: nothing is read later."""
    for place in (folder / VERSIONS).iterdir():
        if ID.fullmatch(place.name) and place.name not in keep:
            take_away(place)


def take_away(place: Path) -> None:
    """Removes a folder. It is hidden first, so that a killed process leaves no half of it under its name."""
    if os.path.lexists(place):
        hidden = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=place.parent))
        place.rename(hidden / place.name)
        shutil.rmtree(hidden)


def sweep(folder: Path) -> None:
    """Removes what killed runs left behind."""
    for place in (*folder.glob(f"{PARTIAL}*"), *(folder / VERSIONS).glob(f"{PARTIAL}*")):
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A hidden folder to fill; removed unless it was renamed."""
    stage = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder / VERSIONS))
    stage.chmod(0o777 & ~umask())  # mkdtemp's are for their owner alone; applications may run as other users
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def copy_checked(source: Path, target: Path, sha256: str) -> None:
    """Raises ManifestError when what was copied is not what the run's record says."""
    value = hashlib.sha256()
    with named(target), source.open("rb") as old, target.open("xb") as new:
        while block := old.read(BLOCK):
            value.update(block)
            new.write(block)
        new.flush()
        os.fsync(new.fileno())
    if value.hexdigest() != sha256:
        raise ManifestError(
            f"{source}: it is not the file that was exported: expected SHA-256 {sha256}, found {value.hexdigest()}; "
            "export again"
        )


def write_new(path: Path, data: bytes, mode: int = 0o666) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with named(path), os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(handle)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut, where the file system can do that."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
