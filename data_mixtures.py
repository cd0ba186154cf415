"""Mixtures: several corpora trained on together, in shares that may change from step to step.

    --corpus=web:0.7,code:0.3        two corpora; the weights are divided by their sum
    --corpus=mixture.json            shares that change: [{"from_step": 0, "weights": {"web": 0.7, "code": 0.3}},
                                                          {"from_step": 900, "weights": {"web": 0.2, "code": 0.8}}]

**Idea.** The sequences of a run are numbered from 0, and a step takes the next `batch` of them. Sequence n comes from
one of the sources, as the next one of that source: a pure function of n, the weights and the sizes of the batches so
far. So a run needs no iterator state. It may go on with another batch size, mesh or number of processes, and neither
skips nor repeats a sequence.

**Formula.** The sources are in a chain. The first one takes its share of all sequences, the second its share of the
rest, and so on. If m sequences have come to a link of the chain, its source has c = floor(q m + 1/2) of them, with q
the source's weight divided by the weights from there on. Here q <= 1, so c grows by 0 or 1: sequence m is the source's
number c, or number m - c of the rest. Where the weights change, q m becomes a sum over stages, from the counts at which
they begin. All counts are of integers, without floating point.

**Bound.** Let c_i(n) be the count of source i in the first n sequences, and w_i its share. For weights that stay, with
the largest first in the chain, |c_i(n) - w_i n| <= (1 + H) / 2 for S sources, H = 1 + 1/2 + ... + 1/(S - 2): 1/2 for
two sources, below 2 for ten. Proof: link k gets m_k sequences in place of W_k n, with an error e_k (e_1 = 0). Rounding
adds at most 1/2, so the source's error is at most 1/2 + q_k e_k and e_(k+1) <= 1/2 + (1 - q_k) e_k. By induction
e_k <= W_k (1/W_2 + ... + 1/W_k) / 2, and W_j >= (k - j + 1) w_k. So any x sequences in a row have w_i x of source i,
to within twice the bound, in a batch as in a million steps. With a schedule and two sources the error stays within 1/2,
since rounding carries over. With more, a change of q_k by d adds at most d e_k to the errors of source k and the rest.

A source of weight 0 gives no sequence while it is 0; its held-out part is evaluated all the same.

**Layout.** Sources that first have a weight in a later stage are at the end of the chain, and a source of weight 0
leaves the others' counts as they are. So a stage or a source that is added to the file, after the step that a run has
reached, does not change the sequences before.

**Left out.** Documents of several sources in one sequence.
"""

import bisect
import functools
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import corpora
import storage

# The batch sizes of a run: (step from which on, sequences in a batch), the first from step 0 on.
Batches = tuple[tuple[int, int], ...]


class Stage(NamedTuple):
    """Shares of the sources from a step on: numbers of at least 0, with a sum of 1, in the order of the sources."""

    from_step: int
    shares: tuple[Fraction, ...]


@dataclass(frozen=True)
class Mixture:
    """Corpora of one tokenizer, and the shares in which their sequences are trained on."""

    name: str  # what error messages call it
    sources: tuple[corpora.Corpus, ...]
    stages: tuple[Stage, ...]

    @property
    def vocab_size(self) -> int:
        return self.sources[0].vocab_size

    @property
    def separator(self) -> int:
        return self.sources[0].separator

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that all sources share, or None; see Corpus.tokenizer."""
        return self.sources[0].tokenizer

    @property
    def identity(self) -> str:
        """A hash of the contents and the shares, whatever the paths. That of its corpus, where there is one."""
        return _identity(self.sources, self.stages)

    def identity_before(self, step: int) -> str:
        """A hash of what decides the sequences of the steps before `step`: the sources and the shares until then."""
        stages = [stage for stage in self.stages if stage.from_step < step] or self.stages[:1]
        used = [any(stage.shares[i] for stage in stages) for i in range(len(self.sources))]
        sources = tuple(itertools.compress(self.sources, used))
        return _identity(sources, [Stage(begin, tuple(itertools.compress(shares, used))) for begin, shares in stages])

    def facts(self) -> dict[str, str]:
        """Returns {what: identity} of all that must be the same on every process of a run."""
        if len(self.sources) == 1:
            return {"the corpus": self.identity}
        facts = {f"the corpus {source.name}": source.identity for source in self.sources}
        return facts | {"the mixture of corpora": self.identity}

    def check(self, seq_len: int, vocab_size: int) -> None:
        """Raises ValueError where a model of this vocabulary and sequence length cannot train on a source."""
        for source in self.sources:
            source.check(seq_len, vocab_size)


def _identity(sources: Sequence[corpora.Corpus], stages: Sequence[Stage]) -> str:
    if len(sources) == 1:
        return sources[0].identity
    shares = [[stage.from_step, *map(str, stage.shares)] for stage in stages]
    text = json.dumps([[source.identity for source in sources], shares])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# -- the command line


def paths(text: str) -> list[str]:
    """The paths of the sources in `--corpus`, and that of the file which lists them. Raises as `open_mixture`."""
    listed = list(_stages(text)[0][1]) if text else []
    return [*listed, *([storage.expanded(text)] if _is_list(text) else [])]


def open_mixture(text: str) -> Mixture:
    """The sources that `--corpus` names, opened.

    Raises:
      ValueError: the text or the file of a mixture is none, two sources are the same or have different tokenizers, or a
        source cannot be used, as corpora.open_corpus.
      OSError: a file is missing or cannot be read.
    """
    stages = _stages(text)
    sources = tuple(map(corpora.open_corpus, stages[0][1]))
    name = sources[0].name if len(sources) == 1 else text
    first, seen = sources[0], {}
    for source in sources:
        kinds = [(each.tokenizer_identity or "unknown", each.vocab_size, each.separator) for each in (first, source)]
        if kinds[0] != kinds[1]:
            says = ["tokenizer {}, a vocabulary of {} and separator {}".format(*kind) for kind in kinds]
            raise ValueError(
                f"{first.name} has {says[0]}, and {source.name} has {says[1]}: the corpora of a mixture must be "
                "prepared with the same --tokenizer"
            )
        if source.identity in seen:
            raise ValueError(
                f"{seen[source.identity]} and {source.name} have the same tokens: name one of them, with the sum of "
                "their weights"
            )
        seen[source.identity] = source.name
    return Mixture(name, sources, tuple(Stage(step, _shares(weights, step)) for step, weights in stages))


def as_mixture(corpus: corpora.Corpus | Mixture) -> Mixture:
    """A corpus as a mixture of one source; a mixture as it is."""
    return corpus if isinstance(corpus, Mixture) else Mixture(corpus.name, (corpus,), (Stage(0, (Fraction(1),)),))


def _shares(weights: dict[str, Fraction], step: int) -> tuple[Fraction, ...]:
    if not (total := sum(weights.values())):
        raise ValueError(f"all weights of --corpus are 0 from step {step} on: give one source a larger one")
    return tuple(weight / total for weight in weights.values())


def _is_list(text: str) -> bool:
    return text.endswith(".json") and not os.path.isdir(text)


def _stages(text: str) -> list[tuple[int, dict[str, Fraction]]]:
    """[(from_step, {path: weight})] of `--corpus`; all stages have all paths, in the same order."""
    if _is_list(text):
        return _listed(storage.expanded(text))
    parts = [part.rpartition(":") for part in text.split(",")]
    if os.path.exists(text) or (len(parts) == 1 and _weight(parts[0][2]) is None):
        return [(0, {storage.expanded(text): Fraction(1)})]
    weights: dict[str, Fraction] = {}
    for path, _, word in parts:
        if (weight := _weight(word)) is None or not path:
            raise ValueError(
                f"corpus={text!r} is no file, and no mixture: {f'{path}:{word}' if path else word!r} has no weight of "
                "at least 0; name a corpus, or several with weights, as in web:0.7,code:0.3"
            )
        if (path := storage.expanded(path)) in weights:
            raise ValueError(f"corpus={text!r} names {path} twice: name it once, with the sum of its weights")
        weights[path] = weight
    return [(0, weights)]


def _listed(path: str) -> list[tuple[int, dict[str, Fraction]]]:
    """Returns what `_stages` does, of a file. Its paths are relative to its folder."""
    content = storage.read_file(path)

    def unique(pairs: list[tuple[str, Any]]) -> dict:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a name occurs twice in an object")
        return dict(pairs)

    try:
        number = lambda word: Fraction(_weight(word))
        read = json.loads(content, parse_float=number, parse_int=number, object_pairs_hook=unique)
        stages = [(stage.pop("from_step"), stage.pop("weights"), stage) for stage in read]
        steps = [step for step, _, _ in stages]
        right = bool(steps) and steps[0] == 0 and all(a < b for a, b in itertools.pairwise(steps))
        right &= all(isinstance(step, Fraction) and step.denominator == 1 for step in steps)
        right &= all(isinstance(weight, Fraction) for _, weights, _ in stages for weight in weights.values())
        right &= not any(rest for *_, rest in stages)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no mixture ({error}): {_LIST}") from None
    if not right:
        raise ValueError(f"{path} is no mixture: {_LIST}")
    names = list(dict.fromkeys(name for _, weights, _ in stages for name in weights))
    return [
        (int(step), {_beside(path, name): weights.get(name, Fraction(0)) for name in names})
        for step, weights, _ in stages
    ]


def _beside(file: str, path: str) -> str:
    """A path in a file, which is relative to the file's folder."""
    path = storage.expanded(path)
    absolute = storage.is_remote(path) or os.path.isabs(path)
    return path if absolute else storage.join(file.rpartition("/")[0], path)


_LIST = (
    'it must be a list of stages, the first from step 0 on, as in [{"from_step": 0, "weights": {"web": 0.7, "code": '
    "0.3}}], with weights of at least 0"
)


def _weight(word: str) -> Fraction | None:
    return Fraction(word) if re.fullmatch(r"\d{1,18}(\.\d{1,18})?([eE][+-]?\d{1,2})?", word) else None


# -- the sequences of a run


def first_sequence(step: int, batches: Batches) -> int:
    """The number of sequences in the steps before `step`."""
    ends = [from_step for from_step, _ in batches[1:]] + [math.inf]
    return sum(max(min(step, end) - begin, 0) * batch for (begin, batch), end in zip(batches, ends, strict=True))


def batch_of(step: int, batches: Batches) -> int:
    """The number of sequences in the step after `step` steps."""
    return next(size for from_step, size in reversed(batches) if from_step <= step)


def continued(batches: Sequence[Sequence[int]], step: int, planned: int | Batches) -> Batches:
    """The batch sizes of a run that goes on from `step` with those that are planned, by its step or the same always."""
    planned = ((0, planned),) if isinstance(planned, int) else planned
    before = [(from_step, size) for from_step, size in batches if from_step < step]
    now = batch_of(step, planned)
    after = [(from_step, size) for from_step, size in planned if from_step > step]
    same = before and before[-1][1] == now
    return (*before, *([] if same else [(step, now)]), *after)


class Shares:
    """Which source each sequence of a run comes from, as in the formula at the top."""

    def __init__(self, stages: Sequence[Stage], batches: Batches):
        """
        Args:
          batches: of the whole run; a stage begins with the first sequence of its step.
        """
        first = lambda i: next(
            ((number, -stage.shares[i]) for number, stage in enumerate(stages) if stage.shares[i]), (len(stages), 0)
        )
        self.chain = sorted(range(len(stages[0].shares)), key=first)
        self._links: list[list[_Piece]] = [[] for _ in self.chain]
        for stage in stages:
            m, rest = first_sequence(stage.from_step, batches), Fraction(1)
            for source, pieces in zip(self.chain, self._links, strict=True):
                share = stage.shares[source]
                pieces.append(_Piece.after(pieces, m, share / rest if rest else Fraction(0)))
                m, rest = m - pieces[-1].count(m), rest - share

    def at(self, n: int) -> tuple[int, int]:
        """(source, number of the sequence in it) of sequence n of the run."""
        for source, pieces in zip(self.chain, self._links, strict=True):
            before, after = _count(pieces, n), _count(pieces, n + 1)
            if after > before:
                return source, before
            n -= before
        raise AssertionError("the last link takes what comes to it")

    def counts(self, n: int) -> list[int]:
        """The number of sequences of each source among the first n of the run."""
        counts = [0] * len(self.chain)
        for source, pieces in zip(self.chain, self._links, strict=True):
            counts[source] = _count(pieces, n)
            n -= counts[source]
        return counts


class _Piece(NamedTuple):
    """A stage at a link: of m >= start sequences that come there, (offset + slope m) // unit are the source's."""

    start: int
    offset: int
    slope: int
    unit: int

    def count(self, m: int) -> int:
        return (self.offset + self.slope * m) // self.unit

    @staticmethod
    def after(pieces: "list[_Piece]", start: int, q: Fraction) -> "_Piece":
        """The next piece of a link: from `start` on, its source has a share q."""
        before = Fraction(pieces[-1].offset + pieces[-1].slope * start, pieces[-1].unit) if pieces else Fraction(1, 2)
        offset = before - q * start
        unit = math.lcm(offset.denominator, q.denominator)
        return _Piece(start, int(offset * unit), int(q * unit), unit)


def _count(pieces: list[_Piece], m: int) -> int:
    if len(pieces) == 1:
        return pieces[0].count(m)
    return pieces[bisect.bisect_right(pieces, m, key=lambda piece: piece.start) - 1].count(m)


@functools.lru_cache(maxsize=8)
def shares(stages: tuple[Stage, ...], batches: Batches) -> Shares:
    return Shares(stages, batches)
