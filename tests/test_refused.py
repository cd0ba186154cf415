"""docs/REFUSED.md has today's answers, and an example of every rule."""

import ast
from pathlib import Path

import pytest

import command
import config as config_lib
import placement
import rules
from benchmarks import refused
from config import Config

ROOT = Path(refused.ROOT)
ERRORS = {flags: refused.refusal(flags) for examples in refused.EXAMPLES.values() for flags in examples}


def test_the_page_is_current():
    assert (ROOT / "docs/REFUSED.md").read_text() == refused.page()


def raises_of(module, names: tuple[str, ...] = ()) -> list[tuple[str, int, int]]:
    """(file, first line, last line) of every raise in a module, or in the functions of these names."""
    tree = ast.parse(Path(module.__file__).read_text())
    within = [node for node in ast.walk(tree) if getattr(node, "name", "") in names] if names else [tree]
    nodes = [node for top in within for node in ast.walk(top) if isinstance(node, ast.Raise) and node.exc]
    return [(Path(module.__file__).name, node.lineno, node.end_lineno) for node in nodes]


def places_of(error: BaseException | None) -> set[tuple[str, int]]:
    """(file, line) of every frame of an error, and of the errors in whose handling it was raised."""
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
        *raises_of(config_lib, ("Config",)),
        *raises_of(rules),
        *raises_of(command, ("check_known",)),
        *raises_of(placement, ("parse_mesh", "fill_mesh", "check_multiple", "check_batch", "core_axis_of")),
    ],
    ids=str,
)
def test_every_refusal_has_an_example(file, first, last):
    reached = set().union(*map(places_of, ERRORS.values()))
    assert any((file, line) in reached for line in range(first, last + 1))


@pytest.mark.parametrize("need", config_lib.flags_by_need("refused"), ids=lambda need: need.instead)
def test_every_flag_without_effect_has_an_example(need):
    names = config_lib.flags_by_need("refused")[need]
    switches = {name for name in names if getattr(Config, name) is True}  # off says what happens anyway
    assert need in [refused.need_of(str(error)) for error in ERRORS.values()] or switches == set(names)


@pytest.mark.parametrize("flags", ERRORS)
def test_each_is_a_sentence_or_two(flags):
    sentence = str(ERRORS[flags])
    assert (
        sentence.count(". ") <= 1 and 20 < len(sentence) < 400 and "\n" not in sentence and not sentence.endswith(".")
    )


# -- the way out


@pytest.mark.parametrize("flags", ERRORS)
def test_each_way_out_that_is_named_leads_out(flags):
    """Consecutive flags of a sentence, without a word between them, are one way out."""
    for advised in refused.ways_out(flags, str(ERRORS[flags])):
        refused.check(advised)


def test_ways_out_are_there_to_be_followed():
    ways = {flags: refused.ways_out(flags, str(error)) for flags, error in ERRORS.items()}
    assert sum(map(bool, ways.values())) > 45
    assert all(ways[flags] for flags in refused.EXAMPLES["Flags that would have no effect"])
    assert ways["--batch=12"] == ["--batch=8", "--batch=16"]
    assert ways["--batch_size=8"] == ["--batch=8", "--vocab_size=8"]
    assert ways["--fp8=dynamic --fp8_block=8"] == [
        "--fp8=dynamic --fp8_block=8 --fp8_granularity=block",
        "--fp8=dynamic",
    ]


@pytest.mark.parametrize(
    "flags",
    [
        "--eval_batches=0 --eval_every=0",
        "--optimizer=sgd --weight_decay=0",
        "--optimizer=adafactor --beta1=0",
        "--mesh=data:8 --no-prefetch",
        "--mesh=fsdp:8 --context_heads=2 --context_impl=ring",
        "--mesh=fsdp:8 --collective_matmul --shard_update --pipeline_schedule=circular --pipeline_rounds=2",
        "--mesh=fsdp:8 --remat_stage --no-context_balance --context_impl=all_to_all",
        "--mesh=fsdp:8 --preset=tiny-moe --buffer_factor=4 --moe_parts=2",
        "--save_every=10 --keep_checkpoints=3 --profile_steps=3:9",
        "--fp8=none --fp8_skip_layers=0 --no-expert_bias --num_experts=0 --window=0 --global_every=0",
    ],
)
def test_what_says_that_something_is_off_is_accepted(flags):
    """So a sweep over meshes or switches can keep all its flags."""
    refused.check(flags)
