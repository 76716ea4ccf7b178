"""Publish an exported model, so that running applications take it over.

RUN is the folder of an `edgeyolo export`. Its models become a new version in
DIR, and DIR/current names it, in one step: whoever loads DIR gets the old
version or the new one, never a half. `edgeyolo.load("DIR")` checks every digest
first; Detector.swap() takes the new version between two frames.

  edgeyolo publish runs/door --to models/door --sign door.key
  edgeyolo publish --rollback models/door
  edgeyolo publish --keygen door.key       also writes door.key.pub
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EngineError
from .options import UsageError
from .output import printable, say

if TYPE_CHECKING:
    from edgeyolo.tools.publish import Publication

    from ..published import Require

HINT = "name a RUN and --to DIR, --rollback DIR or --keygen FILE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", nargs="?", help="the folder of an export")
    parser.add_argument("--to", metavar="DIR", help="the published folder; made when missing")
    parser.add_argument("--sign", metavar="KEY", help="sign with this Ed25519 private key (a PEM file)")
    text = "allow an unsigned version after a signed one"
    parser.add_argument("--unsigned", action="store_true", help=text)
    parser.add_argument(
        "--keep", type=at_least_two, metavar="N", help="versions to keep, the current one among them (default 3)"
    )
    parser.add_argument(
        "--allow-unverified",
        action="store_true",
        help="publish a model whose verification failed or is missing; load() refuses it unless require='intact'",
    )
    parser.add_argument("--rollback", metavar="DIR", help="make the version before the current one current again")
    parser.add_argument("--keygen", metavar="FILE", help="write a new private key, and FILE.pub beside it")


def run(args: argparse.Namespace) -> int:
    chosen = [name for name in ("run_folder", "rollback", "keygen") if getattr(args, name) is not None]
    publishing = chosen == ["run_folder"]
    if len(chosen) != 1 or publishing != (args.to is not None):
        raise UsageError(HINT)
    if not publishing and (args.sign or args.keep or args.allow_unverified or args.unsigned):
        raise UsageError("--sign, --unsigned, --keep and --allow-unverified go with RUN --to DIR")
    if args.sign and args.unsigned:
        raise UsageError("--sign and --unsigned exclude each other")
    try:
        from edgeyolo.tools.publish import publish, rollback, write_keys
    except ImportError as error:
        raise EngineError(f"publishing needs edgeyolo's tools ({error}): pip install 'edgeyolo[tools]'") from error
    if args.keygen is not None:
        public = write_keys(Path(args.keygen))
        say(printable(f"{args.keygen}  private key: keep it to yourself"))
        say(printable(f'{public}  public key: edgeyolo.load("DIR", public_key="{public}")'))
    elif args.rollback is not None:
        show(rollback(args.rollback), "rolled back to")
    else:
        require: Require = "intact" if args.allow_unverified else "verified"
        done = publish(
            args.run_folder,
            args.to,
            sign_key=args.sign,
            require=require,
            keep=args.keep or 3,
            unsigned=args.unsigned,
        )
        show(done, "published" if done.changed else "already current:")
    return 0


def show(done: Publication, verb: str) -> None:
    say(printable(f"{done.folder}: {verb} version {done.version}"))
    for version in done.previous:
        say(f"  kept for rollback: {version}")


def at_least_two(text: str) -> int:
    """argparse type: the current version and one to go back to."""
    if text.isascii() and text.isdigit() and int(text[:9]) >= 2:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number from 2 up, found {text!r}")
