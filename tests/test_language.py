"""The language of the project: sentences, not fragments, and one word for one thing, the field's."""

import ast
import io
import re
import tokenize

import pytest

import command

ROOT = command.ROOT
SOURCES = [*command.modules(), *sorted(ROOT.glob("tests/*.py")), *sorted(ROOT.glob("benchmarks/*.py"))]
SOURCES.remove(ROOT / "tests/test_language.py")  # it names what it forbids
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
name_of = lambda path: path.relative_to(ROOT).as_posix()

# A docstring or a comment is a sentence, or a noun with what qualifies it: it does not begin in the middle of one.
FRAGMENT = re.compile(r"(Of|That of|Those of|What) |As [^,.]*:")
# {word that only this project would use so: what it means elsewhere}.
HOUSE_WORDS = {
    r"turns?": "iteration, tick, round, hop; or rotates",
    r"rooms?": "capacity, space, buffer",
    r"kept": "saved, cached, retained",
    r"told|tells?": "reported, reports",
    r"lies|stands?|stood": "is laid out, is stored, is written",
    r"there and back": "dispatch and combine",
    r"(?:8|16) bits": "FP8, bfloat16",
}
NAMES = {"of", "found", "kept", "told", "whole", "there", "back", "turn", "turns", "room"}
# The labels of a module's head that are in every file the same, in their order; others may be between them.
LABELS = ("Idea", "Formula", "Layout", "Cost", "On TPU7x", "Left out", "Source")


def comments_and_strings(source: str) -> list[tuple[int, str]]:
    """(line, text) of each comment and of each string that is long enough to be a sentence."""
    texts = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts.append((token.start[0], token.string.lstrip("# ")))
        elif token.type == tokenize.STRING and len(token.string) > 12:
            texts.append((token.start[0], token.string.lstrip("rbf").strip("\"' ")))
    return texts


def fragments(prose: list[tuple[int, str]]) -> list[str]:
    """Docstrings and comments that begin in the middle of a sentence."""
    return [f"line {line}: {text[:60]}" for line, text in prose if FRAGMENT.match(text)]


def house_words(text: str) -> list[str]:
    """The house words of a text, with what to write instead."""
    return [
        f"{match[0]!r} ({meaning})"
        for word, meaning in HOUSE_WORDS.items()
        for match in re.finditer(rf"\b(?:{word})\b", text)
    ]


def house_names(source: str) -> list[str]:
    """Names of variables, parameters, fields and functions that say nothing of what they name."""
    named = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            named.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            named.append((node.lineno, node.arg))
        elif isinstance(node, ast.FunctionDef):
            named.append((node.lineno, node.name))
    return [f"line {line}: {name}" for line, name in named if name in NAMES]


def labels_out_of_order(head: str) -> list[str]:
    """The labels of a head that the fixed order has elsewhere."""
    labels = [label for label in re.findall(r"^\*\*([^*]+?)\.?\*\*", head, re.MULTILINE) if label in LABELS]
    return labels if labels != sorted(labels, key=LABELS.index) else []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_sources_have_sentences_and_the_words_of_the_field(path):
    source = path.read_text()
    prose = comments_and_strings(source)
    assert fragments(prose) == []
    assert [f"line {line}: {word}" for line, text in prose for word in house_words(text)] == []
    assert house_names(source) == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_pages_have_the_words_of_the_field(path):
    blocks = re.compile(r"```.*?```|<!-- \w+: .*?<!-- end -->", re.DOTALL)  # commands, and what programs printed
    assert house_words(blocks.sub("", path.read_text())) == []


@pytest.mark.parametrize("path", command.modules(), ids=name_of)
def test_heads_have_their_labels_in_the_fixed_order(path):
    head = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert head and labels_out_of_order(head) == []


@pytest.mark.parametrize(
    "source, number",
    [
        ('"""Of a grouped matmul, where nothing else is asked."""', 1),
        ("x = 1  # What comes in parts is, and its gradient before it goes", 1),
        ('"""As compiled: the step waits."""', 1),
        ('"""As the mask is causal, half of the tiles are skipped."""', 0),
        ('"""The default result dtype of a grouped matmul: that of its operands."""', 0),
    ],
)
def test_the_check_of_fragments_can_fail(source, number):
    assert len(fragments(comments_and_strings(source))) == number


def test_the_check_of_words_can_fail():
    assert len(house_words("In a turn of the loop a device has room for what was kept, in 8 bits.")) == 4
    assert house_words("In an iteration a device has a buffer for the saved FP8 activations; return it.") == []


def test_the_check_of_names_can_fail():
    source = "def of(found, *, whole=1):\n    kept = found\n    return [back for back in kept]"
    assert len(house_names(source)) == 5
    assert house_names("def prediction_of(run):\n    return run.whole_steps") == []


def test_the_check_of_labels_can_fail():
    assert labels_out_of_order("A file.\n\n**Cost**, a layer.\n\n**Idea.** One.") == ["Cost", "Idea"]
    assert labels_out_of_order("A file.\n\n**Idea** (x).\n\n**Prefetch.** y.\n\n**Cost**.\n\n**Left out.**") == []
