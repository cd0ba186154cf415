"""Tests mixtures: which sequence comes when, on any batch, mesh and processes; their shares; what is refused."""

import collections
import itertools
import json
import random
from fractions import Fraction
from functools import partial

import jax
import numpy as np
import pytest
from support import run_values, start, start_two

import corpora
import data
import data_mixtures
import placement
import sharding
from data_mixtures import Shares, Stage

SEQ_LEN = 4


def numbered(name: str, size: int, first: int = 0) -> corpora.Corpus:
    """Returns a corpus of `size` sequences; the first token of a sequence divided by SEQ_LEN is first + its number."""
    tokens = np.arange(first * SEQ_LEN, (first + size) * SEQ_LEN + 1, dtype=np.uint32)
    return corpora.Corpus(name, tokens, tokens, 1 << 20, 0, name)


def stages_of(*stages: tuple[int, list]) -> tuple[Stage, ...]:
    """Stages from (step, weights); the weights are numbers or texts such as "0.7"."""
    fractions = [(step, [Fraction(weight) for weight in weights]) for step, weights in stages]
    return tuple(Stage(step, tuple(weight / sum(weights) for weight in weights)) for step, weights in fractions)


SIZES = (7, 23, 3)  # sequences of the sources: one has fewer than a batch, and all have several epochs
MIXTURES = {
    "one": data_mixtures.as_mixture(numbered("a", 23)),
    "two": data_mixtures.Mixture("two", (numbered("a", 7), numbered("b", 23, 100)), stages_of((0, ["0.7", "0.3"]))),
    "scheduled": data_mixtures.Mixture(
        "scheduled",
        tuple(numbered(name, size, 100 * i) for i, (name, size) in enumerate(zip("abc", SIZES, strict=True))),
        stages_of((0, ["0.7", "0.3", 0]), (3, [0, 1, 0]), (5, [1, 2, "0.5"])),
    ),
}


def stream(mixture: data_mixtures.Mixture, length: int, batches: data_mixtures.Batches) -> list[int]:
    """Returns the first sequences of a run by their definition: each source in its own order."""
    options = dict(batch=length, seq_len=SEQ_LEN, seed=1)
    orders = [iter(data.train_batch(source, 0, **options).tokens[:, 0] // SEQ_LEN) for source in mixture.sources]
    shares = Shares(mixture.stages, batches)
    sources = [int(np.argmax(np.diff([shares.counts(n), shares.counts(n + 1)], axis=0))) for n in range(length)]
    return [int(next(orders[source])) for source in sources]


def seen(mixture, steps, batches, num_processes) -> list[int]:
    """Returns the sequences that the processes of a run read, one after the other, in these steps."""
    numbers = []
    for step in steps:
        batch = [size for begin, size in batches if begin <= step][-1]
        for process in range(num_processes):
            rows = slice(process * batch // num_processes, (process + 1) * batch // num_processes)
            made = data.train_batch(mixture, step, batch=batches, seq_len=SEQ_LEN, seed=1, rows=rows)
            numbers += (made.tokens[:, 0] // SEQ_LEN).tolist()
    return numbers


RUNS = [(processes, batch) for processes in (1, 2, 4) for batch in (4, 8, 12)]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("before", RUNS, ids=str)
def test_no_sequence_is_skipped_or_repeated_by_a_resume(before, name):
    """Whatever the processes and the batch before and after: what is seen is the stream of the run, in its order."""
    mixture, batches = MIXTURES[name], data_mixtures.continued([], 0, before[1])
    first = seen(mixture, range(3), batches, before[0])
    for after in RUNS:
        both = data_mixtures.continued(batches, 3, after[1])
        numbers = first + seen(mixture, range(3, 5), both, after[0])
        assert len(numbers) == 3 * before[1] + 2 * after[1]
        assert numbers == stream(mixture, len(numbers), both), after


MESHES = ["data:8", "fsdp:4,tensor:2", "data:2,context:2,fsdp:2", "pipe:2,fsdp:2,expert:2"]


@pytest.mark.parametrize("text", MESHES)
def test_every_mesh_sees_the_same_sequences(text):
    """The rows that `sharding.place` asks for make the batch, however a mesh splits it."""
    mixture, batches, mesh = MIXTURES["two"], ((0, 8), (2, 16)), sharding.make_mesh(placement.parse_mesh(text))
    for step, batch in ((1, 8), (2, 16), (3, 16)):
        make = partial(data.train_batch, mixture, step, batch=batches, seq_len=SEQ_LEN, seed=1)
        placed = sharding.place(data.Batch, make, batch, np.arange(SEQ_LEN), mesh)
        for ours, expected in zip(jax.device_get(placed), make(), strict=True):
            np.testing.assert_array_equal(ours, expected)


def test_each_epoch_of_a_source_has_every_sequence_once():
    mixture = MIXTURES["scheduled"]
    numbers = seen(mixture, range(40), ((0, 6), (9, 5)), 1)
    assert len(numbers) == 9 * 6 + 31 * 5
    for first, size in zip((0, 100, 200), SIZES, strict=True):
        own = [number - first for number in numbers if first <= number < first + 100]
        assert len(own) > size  # more than an epoch
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
    epochs = data.epochs(mixture, 40, batches=((0, 6), (9, 5)), seq_len=SEQ_LEN)
    counts = collections.Counter(number // 100 for number in numbers)
    assert epochs == {name: counts[i] / size for i, (name, size) in enumerate(zip("abc", SIZES, strict=True))}


def test_the_sizes_of_batches():
    assert data_mixtures.continued([], 0, 8) == ((0, 8),)
    assert data_mixtures.continued([[0, 8]], 10, 8) == ((0, 8),)
    assert data_mixtures.continued([[0, 8]], 10, 16) == ((0, 8), (10, 16))
    assert data_mixtures.continued([[0, 8], [10, 16]], 10, 4) == ((0, 8), (10, 4))  # no step was taken with 16
    assert data_mixtures.continued([[0, 8], [10, 16]], 10, 8) == ((0, 8),)
    assert data_mixtures.continued([[0, 8]], 0, 4) == ((0, 4),)
    first = partial(data_mixtures.first_sequence, batches=((0, 8), (10, 16), (12, 3)))
    assert [first(step) for step in (0, 1, 10, 11, 12, 13, 15)] == [0, 8, 80, 96, 112, 115, 121]


RECORDED = """
import json, runpy
import data
read = data.train_batch

def train_batch(corpus, step, **options):
    batch = read(corpus, step, **options)
    with open("{file}", "a") as file:
        file.write(json.dumps([step, options["rows"].start or 0, batch.tokens[:, 1].tolist()]) + "\\n")
    return batch

data.train_batch = train_batch
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    yield from run_values(tmp_path_factory.mktemp("values"))


@pytest.mark.slow
def test_a_run_that_changes_batch_mesh_and_processes_sees_the_stream(values, tmp_path):
    """One process with 8 sequences a step, then 16 on another mesh, then two processes with 8 and a later stage."""
    sources, sizes = [str(tmp_path / "a"), str(tmp_path / "b")], (60, 40)
    for path, size, first in zip(sources, sizes, (0, 100), strict=True):  # token 1 of a sequence is its number
        documents = [np.repeat(np.arange(first, first + size), 32)], [np.arange(99)]
        corpora.write_corpus(path, *documents, vocab_size=256, separator=255)
    values = values | dict(num_layers=1, seed=1, checkpoint_dir=tmp_path / "checkpoints")
    listed = [{"from_step": 0, "weights": {"a": 0.7, "b": 0.3}}]
    (tmp_path / "mixture.json").write_text(json.dumps(listed))
    values |= dict(corpus=tmp_path / "mixture.json")
    program = ("-c", RECORDED.format(file=tmp_path / "seen"))
    for changes in (dict(batch=8, steps=3), dict(batch=16, steps=6, mesh="data:2,fsdp:2,tensor:2")):
        assert start(values | changes, tmp_path / "out", program=program).wait(300) == 0
    assert "batch is 8 there and 16 here" in (tmp_path / "out").read_text()
    (tmp_path / "mixture.json").write_text(json.dumps([*listed, {"from_step": 9, "weights": {"b": 1}}]))
    both = start_two(values | dict(mesh="fsdp:4,tensor:2"), tmp_path, program=program)  # up to step 20
    assert [process.wait(300) for process in both] == [0, 0]
    rows = sorted(json.loads(line) for line in (tmp_path / "seen").read_text().splitlines())
    assert [sum(len(numbers) for at, _, numbers in rows if at == step) for step in range(20)] == [8] * 3 + [16] * 3 + [
        8
    ] * 14
    numbers = [number for _, _, some in rows for number in some]
    batches = ((0, 8), (3, 16), (6, 8))
    mixture, shares = (
        data_mixtures.open_mixture(str(values["corpus"])),
        Shares(stages_of((0, [7, 3]), (9, [0, 1])), batches),
    )
    orders = [
        iter(data.train_batch(source, 0, batch=len(numbers), seq_len=32, seed=1).tokens[:, 1].tolist())
        for source in mixture.sources
    ]
    assert numbers == [next(orders[shares.at(n)[0]]) for n in range(len(numbers))]
    assert all(number >= 100 for number in numbers[3 * 8 + 3 * 16 + 3 * 8 :])
    assert "resumed    from step 6 in" in (said := (tmp_path / "0.out").read_text()) and "corpus is" not in said
    saved = json.loads((tmp_path / "checkpoints" / "20" / "config" / "metadata").read_text())
    assert saved["batches"] == [list(pair) for pair in batches]


# -- shares


def harmonic_bound(num_sources: int) -> Fraction:
    """The bound in the docstring of data_mixtures.py."""
    return (1 + sum(Fraction(1, k) for k in range(1, num_sources - 1))) / 2


@pytest.mark.parametrize("num_sources", [2, 3, 5, 10])
def test_counts_stay_within_the_bound_of_the_shares(num_sources):
    rng = random.Random(num_sources)
    for _ in range(20):
        (stage,) = stages_of((0, [rng.choice([0, 1, 1, rng.randint(1, 1000)]) for _ in range(num_sources - 1)] + [1]))
        shares, counted = Shares([stage], ((0, 1),)), [0] * num_sources
        for n in range(300):
            source, number = shares.at(n)
            assert number == counted[source]
            counted[source] += 1
            assert counted == shares.counts(n + 1)
            errors = [abs(count - share * (n + 1)) for count, share in zip(counted, stage.shares, strict=True)]
            assert max(errors) <= harmonic_bound(num_sources)
        far = 10**15 + rng.randrange(10**6)
        errors = [abs(c - share * far) for c, share in zip(shares.counts(far), stage.shares, strict=True)]
        assert sum(shares.counts(far)) == far and max(errors) <= harmonic_bound(num_sources)
        assert all(c == 0 for c, share in zip(counted, stage.shares, strict=True) if not share)


def bound_of_a_schedule(stages, chain) -> list[Fraction]:
    """[error of each link's source], by the induction in data_mixtures.py, with changes of the weights."""
    error, errors = Fraction(0), []
    for link in range(len(chain)):
        rest = [sum(stage.shares[source] for source in chain[link:]) for stage in stages]
        share = [stage.shares[chain[link]] for stage in stages]
        q = [s / r if r else Fraction(0) for s, r in zip(share, rest, strict=True)]
        change = sum(abs(b - a) for a, b in itertools.pairwise(q))
        errors.append(Fraction(1, 2) + error * (max(q) + change))
        error = Fraction(1, 2) + error * (1 - min(q) + change)
    return errors


@pytest.mark.parametrize("num_sources", [2, 3, 6])
def test_counts_stay_within_the_bound_of_a_schedule(num_sources):
    """Also where stages are shorter than a batch, so that a source has less than one sequence in each."""
    rng = random.Random(num_sources)
    for _ in range(10):
        steps = sorted(rng.sample(range(1, 60), 12))
        weights = lambda: [*(rng.choice([0, 1, rng.randint(1, 99)]) for _ in range(num_sources - 1)), 1]
        stages = stages_of(*((step, weights()) for step in (0, *steps)))
        shares, ideal = Shares(stages, ((0, 3), (20, 1))), [Fraction(0)] * num_sources
        bounds = dict(zip(shares.chain, bound_of_a_schedule(stages, shares.chain), strict=True))
        step, left = 0, 3
        for n in range(100):
            if not left:
                step, left = step + 1, 3 if step + 1 < 20 else 1
            left -= 1
            stage = [stage for stage in stages if stage.from_step <= step][-1]
            source, number = shares.at(n)
            assert number == shares.counts(n)[source] and stage.shares[source]  # none of weight 0
            ideal = [total + share for total, share in zip(ideal, stage.shares, strict=True)]
            counts = shares.counts(n + 1)
            assert sum(counts) == n + 1
            assert all(abs(counts[i] - ideal[i]) <= bounds[i] for i in range(num_sources))
            if num_sources == 2:
                assert abs(counts[0] - ideal[0]) <= Fraction(1, 2)


def test_a_source_that_is_due_less_than_once_a_stage_comes_all_the_same():
    stages = stages_of(*((step, [20 + step % 2, 1]) for step in range(400)))
    assert Shares(stages, ((0, 8),)).counts(3200)[1] == pytest.approx(3200 * 0.0465, abs=1)


def test_what_is_added_later_does_not_change_what_was():
    """A stage, or a source, from a later step on; a batch size from a later step on."""
    before = stages_of((0, [2, 1, 1]), (4, [1, 3, 0]))
    after = stages_of((0, [2, 1, 1, 0]), (4, [1, 3, 0, 0]), (9, [0, 1, 1, 5]))
    first, second = Shares(before, ((0, 8),)), Shares(after, ((0, 8), (8, 20)))
    assert [first.at(n) for n in range(8 * 8)] == [second.at(n) for n in range(8 * 8)]


def test_the_identity_of_the_past_does_not_depend_on_what_comes_later():
    sources = {name: numbered(name, 9, 100 * i) for i, name in enumerate("abc")}
    mixture = lambda names, *stages: data_mixtures.Mixture("m", tuple(map(sources.get, names)), stages_of(*stages))
    two = mixture("ab", (0, [1, 1]))
    assert [two.identity_before(step) for step in (0, 1, 9)] == [two.identity] * 3
    later = mixture("abc", (0, [1, 1, 0]), (5, [0, 1, 1]))
    assert [later.identity_before(step) == two.identity for step in (0, 1, 5, 6)] == [True, True, True, False]
    alone = mixture("abc", (0, [1, 0, 0]), (5, [0, 1, 1]))
    assert alone.identity_before(5) == "a" != alone.identity_before(6)
    others = [mixture("ab", (0, [1, 2])), mixture("ba", (0, [1, 1])), mixture("ac", (0, [1, 1]))]
    assert len({other.identity_before(9) for other in (two, *others)}) == 4


# -- the command line


def write(tmp_path, name: str, tokens=range(50), vocab_size: int = 100, separator: int = 99) -> str:
    path = str(tmp_path / name)
    corpora.write_corpus(path, [np.array(tokens)], [np.arange(20)], vocab_size=vocab_size, separator=separator)
    return path


def test_weights_on_the_command_line(tmp_path):
    a, b = write(tmp_path, "a"), write(tmp_path, "b", range(40))
    mixture = data_mixtures.open_mixture(f"{a}:0.7,{b}:0.3")
    assert [source.name for source in mixture.sources] == [a, b] == data_mixtures.paths(f"{a}:0.7,{b}:0.3")
    assert mixture.stages == (Stage(0, (Fraction(7, 10), Fraction(3, 10))),)
    assert (mixture.vocab_size, mixture.separator, mixture.name) == (100, 99, f"{a}:0.7,{b}:0.3")
    assert data_mixtures.open_mixture(f"{a}:7,{b}:3").identity == mixture.identity  # only the shares count
    others = [f"{a}:0.7,{b}:0.4", f"{b}:0.7,{a}:0.3", a, b]
    assert len({data_mixtures.open_mixture(text).identity for text in others} | {mixture.identity}) == 5
    assert mixture.facts().keys() == {f"the corpus {a}", f"the corpus {b}", "the mixture of corpora"}


def test_a_single_corpus_is_what_it_was(tmp_path, monkeypatch):
    """Its identity, name and order, also where its name has a colon, a comma or a weight."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "a:0.5", "a:1,b:2"):
        corpus, mixture = corpora.open_corpus(write(tmp_path, name)), data_mixtures.open_mixture(name)
        assert (mixture.identity, mixture.name) == (corpus.identity, name)
        assert mixture.facts() == {"the corpus": corpus.identity}
        options = dict(batch=4, seq_len=5, seed=3)
        for ours, theirs in zip(
            data.train_batch(mixture, 7, **options), data.train_batch(corpus, 7, **options), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    assert data_mixtures.open_mixture("").name.startswith("the standard library") and data_mixtures.paths("") == []
    assert data_mixtures.open_mixture("./a:2").stages == (Stage(0, (1,)),)


def test_a_file_of_stages(tmp_path):
    """Its paths are relative to it; numbers are exact; a source may come in later."""
    (tmp_path / "of").mkdir()
    a, b, c = write(tmp_path, "of/a"), write(tmp_path, "of/b", range(40)), write(tmp_path, "c", range(30))
    file = tmp_path / "of" / "mixture.json"
    file.write_text(
        '[{"from_step": 0, "weights": {"a": 0.1, "b": 0.2}}, {"from_step": 9, "weights": {"b": 1, "../c": 1e1}}]'
    )
    mixture = data_mixtures.open_mixture(str(file))
    assert [source.identity for source in mixture.sources] == [corpora.open_corpus(path).identity for path in (a, b, c)]
    assert mixture.stages == stages_of((0, [1, 2, 0]), (9, [0, 1, 10]))
    assert data_mixtures.paths(str(file))[-1] == str(file) and len(data_mixtures.paths(str(file))) == 4


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "is no mixture (Expecting value"),
        ("{}", "is no mixture"),
        ("[]", "is no mixture: it must be a list of stages"),
        ([{"from_step": 1, "weights": {"a": 1}}], "the first from step 0 on"),
        ([{"from_step": 0, "weights": {"a": -1}}], "with weights of at least 0"),
        ([{"from_step": 0, "weights": {"a": "1"}}], "with weights of at least 0"),
        ([{"from_step": 0, "weights": {"a": 1}, "seed": 1}], "is no mixture"),
        ([{"from_step": 0, "weights": {"a": 1}}, {"from_step": 0, "weights": {"b": 1}}], "is no mixture"),
        ([{"from_step": 0, "weights": {"a": 1}}, {"from_step": 1.5, "weights": {"b": 1}}], "is no mixture"),
        ('[{"from_step": 0, "weights": {"a": 1, "a": 2}}]', "a name occurs twice"),
        (
            [{"from_step": 0, "weights": {"a": 1, "b": 1}}, {"from_step": 5, "weights": {"a": 0}}],
            "are 0 from step 5 on",
        ),
        ("[" * 100_000, "is no mixture"),
    ],
)
def test_a_file_that_is_no_mixture_is_refused(content, message, tmp_path):
    write(tmp_path, "a"), write(tmp_path, "b", range(40))
    file = tmp_path / "mixture.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as error:
        data_mixtures.open_mixture(str(file))
    assert message in str(error.value)


@pytest.mark.parametrize("text, message", [
    ("a:0.7,b", "'b' has no weight of at least 0; name a corpus, or several with weights, as in web:0.7,code:0.3"),
    ("a:0.7,b:-1", "'b:-1' has no weight"),
    ("a:0.7,b:nan", "'b:nan' has no weight"),
    ("a:0.7,:1", "'1' has no weight"),
    ("a:1,a:2", "twice: name it once, with the sum of its weights"),
    ("a:0,b:0", "all weights of --corpus are 0 from step 0 on"),
    ("a:1,copy:1", "a and copy have the same tokens"),
    ("a:1,large:1", "a has tokenizer unknown, a vocabulary of 100 and separator 99, and large has tokenizer unknown, a "
     "vocabulary of 200 and separator 99: the corpora of a mixture must be prepared with the same --tokenizer"),
    ("a:1,other:1", "separator 98: the corpora of a mixture must"),
])  # fmt: skip
def test_a_mixture_that_cannot_be_is_refused(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a"), write(tmp_path, "copy"), write(tmp_path, "b", range(40))
    write(tmp_path, "large", vocab_size=200), write(tmp_path, "other", separator=98)
    with pytest.raises(ValueError) as error:
        data_mixtures.open_mixture(text)
    assert message in str(error.value)


def test_corpora_of_two_tokenizers_are_refused(tmp_path):
    """Also where vocabulary and separator are the same."""
    for name, tokenizer in (("a", "1234"), ("b", "5678")):
        (tmp_path / name).mkdir()
        made = corpora.open_corpus(write(tmp_path / name, "00000.bin", range(40 + len(tokenizer))))
        shard = dict(file="00000.bin", train=len(made.train), held_out=len(made.held_out), identity=made.identity)
        known = dict(identity=tokenizer, special_tokens={"<s>": 99})
        corpora.write_index(str(tmp_path / name), [shard], vocab_size=100, separator=99, tokenizer=known)
    with pytest.raises(ValueError, match=r"a has tokenizer 1234, .* and .*b has tokenizer 5678, .* same --tokenizer"):
        data_mixtures.open_mixture(f"{tmp_path}/a:1,{tmp_path}/b:1")
