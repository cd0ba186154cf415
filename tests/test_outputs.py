"""Tests files that take their name when they are complete."""

import os
import re
from pathlib import Path

import pytest

import command
import outputs

ROOT = Path(outputs.__file__).parent


def files_of(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("mode, content", [("w", "Grüße\n"), ("wb", b"\xff\x00")])
def test_a_file_takes_its_name_when_it_is_complete(tmp_path, mode, content):
    path = tmp_path / "file"
    path.write_text("before")
    with outputs.replacing(path, mode) as file:
        file.write(content)
        assert path.read_text() == "before"
    assert path.read_bytes() == (content if mode == "wb" else content.encode())
    assert files_of(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_no_other(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(error), outputs.replacing(path) as file:
        file.write("half")
        raise error
    assert path.read_text() == "before" and files_of(tmp_path) == ["file"]


def test_permissions_are_those_of_an_ordinary_file(tmp_path):
    (tmp_path / "ordinary").write_text("")
    with outputs.replacing(tmp_path / "file"):
        pass
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_planted_link_is_not_followed(tmp_path, monkeypatch, link):
    """Even if somebody guessed the random part of the name."""
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("precious")
    monkeypatch.setattr(outputs.secrets, "token_hex", lambda _: "guessed")
    link(victim, tmp_path / "file.guessed.unfinished")
    with pytest.raises(FileExistsError), outputs.replacing(path) as file:
        file.write("other")
    assert victim.read_text() == "precious" and not path.exists()


def test_a_link_at_the_path_itself_is_replaced(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "file").symlink_to("victim")
    with outputs.replacing(tmp_path / "file") as file:
        file.write("new")
    assert (tmp_path / "victim").read_text() == "precious" and (tmp_path / "file").read_text() == "new"


def test_files_left_by_a_kill_do_no_harm(tmp_path):
    (tmp_path / "file.0123abcd.unfinished").write_text("half")
    (tmp_path / "file.unfinished").mkdir()
    with outputs.replacing(tmp_path / "file") as file:
        file.write("new")
    assert (tmp_path / "file").read_text() == "new"


def test_a_device_or_a_folder_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ValueError, match=re.escape(f"{path} exists, and is no file: name another")):
            with outputs.replacing(path):
                pass


def test_an_output_that_is_an_input_by_any_path_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("precious")
    (tmp_path / "soft").symlink_to("text")
    os.link(tmp_path / "text", tmp_path / "hard")
    for name in ("text", "./folder/../text", str(tmp_path / "text"), "soft", "hard"):
        message = f"^--out={re.escape(name)} is the text, too: it would be lost; name another file$"
        with pytest.raises(ValueError, match=message):
            outputs.check_apart({"--out": name}, {"the text": "text"})
    for name in ("folder/new", "folder/deep/new"):
        with pytest.raises(ValueError, match=f"--out={name} is inside the texts, which is read: name a file elsewhere"):
            outputs.check_apart({"--out": name}, {"the texts": "folder"})
    with pytest.raises(ValueError, match=r"--second=\./new is --first, too"):
        outputs.check_apart({"--first": "new", "--second": "./new"}, {})
    outputs.check_apart({"--out": "new", "--log": "folder.new", "--unset": ""}, {"a": "text", "b": "folder", "c": ""})


def test_no_other_module_replaces_files():
    """log.py alone may, which moves the metrics of an earlier run away."""
    beside = re.compile(r"os\.replace\(|with_suffix\(\"\.unfinished")
    sources = [*command.modules(), *ROOT.glob("benchmarks/*.py")]
    assert {path.name for path in sources if beside.search(path.read_text())} <= {"outputs.py", "log.py"}


def test_a_path_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    outputs.check_writable("--out=new/deep/file", tmp_path / "new" / "deep" / "file")
    outputs.check_writable("--out=file", tmp_path / "file")
    assert files_of(tmp_path) == ["file", "new"] and files_of(tmp_path / "new" / "deep") == []
    for path, message in (("file/x", "cannot be written: .*file"), ("new", "exists, and is no file")):
        with pytest.raises(ValueError, match=f"^--out=here {message}"):
            outputs.check_writable("--out=here", tmp_path / path)
