"""The page of what is refused: as the code answers, and complete."""

import ast
from pathlib import Path

import pytest

import command
import config as config_lib
import placement
import rules
from benchmarks import refused

ROOT = Path(refused.ROOT)
ERRORS = {flags: refused.refusal(flags) for examples in refused.EXAMPLES.values() for flags in examples}


def test_the_page_is_current():
    assert (ROOT / "REFUSED.md").read_text() == refused.page()


def raises_of(module, names: tuple[str, ...] = ()) -> list[tuple[str, int, int]]:
    """(file, first line, last line) of every raise in a module, or in some of its functions."""
    tree = ast.parse(Path(module.__file__).read_text())
    within = [node for node in ast.walk(tree) if getattr(node, "name", "") in names] if names else [tree]
    nodes = [node for top in within for node in ast.walk(top) if isinstance(node, ast.Raise) and node.exc]
    return [(Path(module.__file__).name, node.lineno, node.end_lineno) for node in nodes]


def places_of(error: BaseException | None) -> set[tuple[str, int]]:
    """Where an error was raised, and those that it was raised in place of."""
    places = set()
    while error:
        trace = error.__traceback__
        while trace:
            places.add((Path(trace.tb_frame.f_code.co_filename).name, trace.tb_lineno))
            trace = trace.tb_next
        error = error.__context__
    return places


@pytest.mark.parametrize(
    "file, first, last",
    [
        *raises_of(config_lib, ("Config", "check_effect")),
        *raises_of(rules),
        *raises_of(command, ("check_known",)),
        *raises_of(placement, ("parse_mesh", "fill_mesh", "check_multiple", "check_batch", "core_axis_of")),
    ],
    ids=str,
)
def test_every_refusal_has_an_example(file, first, last):
    reached = set().union(*map(places_of, ERRORS.values()))
    assert any((file, line) in reached for line in range(first, last + 1))


@pytest.mark.parametrize("names, why", [(names, why) for names, _, why, _ in (*config_lib.NEEDS, *rules.NEEDS)])
def test_every_flag_without_effect_has_an_example(names, why):
    assert (names, why) in [refused.rule_of(str(error)) for error in ERRORS.values()]


@pytest.mark.parametrize("flags", ERRORS)
def test_each_is_a_sentence_or_two(flags):
    sentence = str(ERRORS[flags])
    assert (
        sentence.count(". ") <= 1 and 20 < len(sentence) < 400 and "\n" not in sentence and not sentence.endswith(".")
    )
