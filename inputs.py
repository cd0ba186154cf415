"""Paths, names and stages as users write them, and the messages that refuse wrong ones."""

import difflib
import itertools
import os
import re
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


def rampup(text: str, batch: int) -> tuple[tuple[int, int], ...]:
    """The stages of --batch_rampup, (first step, batch) each; one where it is empty. Raises ValueError for others."""
    if not text:
        return ((0, batch),)
    if not re.fullmatch(r"\d{1,9}:\d{1,9}(,\d{1,9}:\d{1,9})*", text):
        raise ValueError(f"batch_rampup={text!r} must be STEP:BATCH,... as in 0:4,100:8,300:16")
    stages = tuple((int(step), int(size)) for step, _, size in (stage.partition(":") for stage in text.split(",")))
    grow = all(a < b and m < n for (a, m), (b, n) in itertools.pairwise(stages))
    if stages[0][0] or not stages[0][1] or not grow:
        raise ValueError(
            f"batch_rampup={text!r} must begin at step 0 with a batch of 1 or more, and both steps and batches must "
            "grow, as in 0:4,100:8,300:16"
        )
    if stages[-1][1] != batch:
        last = stages[-1][1]
        raise ValueError(f"batch_rampup={text!r} ends with {last} sequences, not with batch={batch}: --batch={last}")
    return stages
