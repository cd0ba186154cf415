"""Tests processes that would run differently: each reports the difference, and none waits for another."""

import dataclasses
import shutil
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from support import run_values, start_two

import agreement
import corpora
import families
import parameters
import weights
from config import Config


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    yield from run_values(tmp_path_factory.mktemp("values"))


def error_of_both(processes, directory: Path, timeout_s: float = 180) -> str:
    """Returns the last line of both processes; asserts that both ended with status 1 and the same line."""
    try:
        statuses = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    errors = [(directory / f"{i}.err").read_text() for i in (0, 1)]
    assert statuses == [1, 1], "\n".join(errors)
    first, second = (text.splitlines()[-1] for text in errors)
    assert first == second and (directory / "0.out").read_text() == ""
    return first


@pytest.mark.at_most(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "value", "first"),
    [
        ("learning_rate", 0.01, "0.003"),
        ("checkpoint_dir", "elsewhere", None),
        ("corpus", "", None),
        ("mesh", "fsdp:4", "'fsdp:8'"),
        ("mesh", "fsdp:7", "'fsdp:8'"),  # refused before devices are made
        ("preset", "tiny-moe", "'tiny'"),
    ],
)
def test_another_flag_is_named_by_both(flag, value, first, values, tmp_path):
    if flag == "checkpoint_dir":
        value = str(tmp_path / value)
    error = error_of_both(start_two(values, tmp_path, second={flag: value}), tmp_path)
    first = first or repr({**values, "checkpoint_dir": str(tmp_path / "checkpoints")}[flag])
    assert error.startswith(
        f"train.py: error: the processes of this run disagree: --{flag} is {first} on process 0 and {value!r} on "
    )
    assert error.endswith("start all of them with the same command, code and files")


OWN_FOLDER = """
import dataclasses, os, sys
import data, flags, train

run = flags.parse_flags(flags.__file__, sys.argv[1:])
os.chdir(f"{folder}/{{run.process_id}}")
try:
    train.run(dataclasses.replace(run, {flag}="{path}"))
except (ValueError, OSError) as error:
    sys.exit(str(error))
"""


@pytest.mark.at_most(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["another checkpoint_dir", "another corpus", "another source", "no corpus", "other weights"]
)
def test_a_path_that_leads_elsewhere_is_named_by_both(case, values, tmp_path):
    """The processes have separate folders, as two hosts do, and the path is relative."""
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        shutil.copytree(values["corpus"], tmp_path / str(number) / "c")
    path = tmp_path / "1/c"
    if case == "another source":
        for number in (0, 1):
            documents = [np.arange(500 + number) % 251], [np.arange(99)]
            corpora.write_corpus(str(tmp_path / str(number) / "d.bin"), *documents, vocab_size=256, separator=255)
    elif case == "another corpus":
        corpus = corpora.open_corpus(str(path))
        other = np.array(corpus.train[:])
        other[-1] ^= 1
        shutil.rmtree(path)  # a single file under the name of the folder
        corpora.write_corpus(str(path), [other[1:]], [corpus.held_out[1:]], vocab_size=256, separator=255)
    elif case == "no corpus":
        shutil.rmtree(path)
    elif case == "other weights":
        config = Config(**{name: value for name, value in values.items() if name in families.model_fields()})
        for number in (0, 1):  # the last value differs
            params = jax.tree.map(lambda a: np.zeros(a.shape, np.float32), parameters.param_shapes(config))
            params.unembed[-1, -1] = number
            weights.export(params, config, str(tmp_path / str(number) / "w"))
    flags = {"checkpoint_dir": "checkpoints", "corpus": "c", "weights": "w", "source": "c:0.7,d.bin:0.3"}
    flag, path = next(pair for pair in flags.items() if pair[0] in case)
    flag = "corpus" if flag == "source" else flag
    program = OWN_FOLDER.format(folder=tmp_path, flag=flag, path=path)
    processes = start_two(values, tmp_path, program=("-c", program))
    if case == "no corpus":
        assert [process.wait(180) for process in processes] == [1, 1]
        error = "[Errno 2] No such file or directory: 'c'\n"
        assert (tmp_path / "0.err").read_text() == f"process 1 cannot start: {error}"
        assert (tmp_path / "1.err").read_text() == error
        return
    error = error_of_both(processes, tmp_path)
    if case in ("another corpus", "another source", "other weights"):
        what = "the corpus" if "corpus" in case else "the corpus d.bin" if "source" in case else "the folder of weights"
        assert error.startswith(f"the processes of this run disagree: {what} is ") and error.count("process") >= 3
    else:
        mark = "the file that process 0 writes to --checkpoint_dir"
        assert f"{mark} is present on process 0 and missing on process 1: start all" in error


def test_all_flags_are_compared_but_those_of_a_process():
    """Versions, code and environment are compared, too, and a difference in any is reported."""
    facts = agreement.decided_by(Config())
    names = {f"--{field.name}" for field in dataclasses.fields(Config)}
    assert names - facts.keys() == {
        "--process_id",
        "--coordinator",
        "--metrics_file",
        "--tensorboard_dir",
        "--profile_dir",
        "--compilation_cache",
    }
    code = zlib.crc32(Path(agreement.__file__).read_bytes())
    assert facts["the checksum of agreement.py"] == f"{code:08x}" and "the checksum of pytest.py" not in facts
    assert facts["numpy"] == np.__version__ and "XLA_FLAGS" in facts
    assert agreement.differences([facts, agreement.decided_by(Config(seed=1)) | {"numpy": "1.0"}]) == [
        "--seed is 0 on process 0 and 1 on process 1",
        f"numpy is {np.__version__} on process 0 and 1.0 on process 1",
    ]


def test_three_of_many_processes_are_named():
    facts = [{"--checkpoint_dir": "c", "--seed": seed} for seed in "01111"]
    assert agreement.differences(facts[:4]) == ["--seed is 0 on process 0 and 1 on processes 1, 2, 3"]
    assert agreement.differences(facts) == ["--seed is 0 on process 0 and 1 on processes 1, 2, 3 and 1 more"]


def test_the_newest_checkpoint_is_compared_only_in_the_same_folder(tmp_path):
    for name in ("4", "12", "8", "12.unfinished"):
        (tmp_path / name).mkdir()
    (tmp_path / agreement._MARK_FILE).write_text("of this run")
    here, elsewhere = agreement.seen_in(tmp_path), agreement.seen_in(tmp_path / "4")
    assert [*here.values()] == ["of this run", "12"] and [*elsewhere.values()] == ["missing", "none"]
    differences = lambda *folders: agreement.differences(
        [{"--checkpoint_dir": folder} | seen for folder, seen in zip(folders, (here, elsewhere), strict=True)]
    )
    assert len(differences("c", "c")) == 2
    assert differences("c", "d") == ["--checkpoint_dir is c on process 0 and d on process 1"]
