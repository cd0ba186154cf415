"""Paths and names as users write them, and the messages that refuse wrong ones."""

import difflib
import os
from collections.abc import Collection


def expanded(path: str, schemes: Collection[str] = ()) -> str:
    """Expands ~ in a path. Raises ValueError for a URL of another scheme, and for an unknown user's home."""
    scheme, colon, _ = path.partition("://")
    if colon and scheme not in schemes:
        others = "".join(f", or of {known}://" for known in schemes)
        raise ValueError(f"{path!r} must be a path of this machine{others}")
    full = os.path.expanduser(path)
    if full.startswith("~"):
        raise ValueError(f"{path!r} is in no user's home folder; a file of that name is ./{path}")
    return full


def did_you_mean(name: str, known: Collection[str], prefix: str = "", otherwise: str = "") -> str:
    """The end of a message that refuses a name: the nearest known names, at most three.

    If none is near: `otherwise`, or all known names, if they are not too many to read.
    """
    near = [prefix + word for word in difflib.get_close_matches(name, known, n=3, cutoff=0.6)]
    if near:
        return f"; did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}?"
    return f"; there are {otherwise or ', '.join(known)}" if otherwise or len(known) <= 30 else "; --help has them all"
