"""A Config from the command line: flags over a recipe over a preset.

A preset (presets.py) has the values of a model, a recipe (published.py) those of a whole run. Flags on the command line
override both; what then has no effect is left at its default. --weights has the model of its config.json, and no flag
may give another shape.

    python train.py --preset=llama3.1-8b --mesh=fsdp:64,tensor:2 --batch=128 --no-prefetch
    python flags.py --preset=llama3.1-8b                                                  every field and its value
"""

import argparse
import dataclasses
import functools
import inspect
import re
from collections.abc import Collection, Sequence

import command
import families
import inputs
from config import ACTIVATIONS, REMAT_POLICIES, Config, idle
from presets import PRESETS
from published import RECIPES, Recipe

# Additions to the help of a flag, which is the comment above its field.
_MORE = {
    "preset": ", ".join(PRESETS),
    "recipe": ", ".join(RECIPES),
    "remat": f"{', '.join(REMAT_POLICIES)}, auto (the fastest that fits; roofline.py remat shows them all)",
    "remat_tensors": ", ".join((*ACTIVATIONS, "qkv_proj")),
    "fp8": "none, dynamic (a tensor's largest element, now), delayed (that of the last steps), static (that of a "
    "profile, in --fp8_scales), calibrate (dynamic, and makes the profile), fixed (+-224; of gradients dynamic)",
}


def from_preset(preset: str, **overrides) -> Config:
    """The preset's values with `overrides` on top. Raises ValueError for a preset or a field that does not exist."""
    return _built({"preset": preset}, overrides)


def _built(below: dict, overrides: dict) -> Config:
    """`overrides` on top of `below` on top of their preset; of the latter two only what has an effect beside them."""
    preset = overrides.get("preset", below["preset"])
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} does not exist{inputs.did_you_mean(preset, PRESETS)}")
    fields = {field.name: field.default for field in dataclasses.fields(Config)}
    for name in overrides:
        if name not in fields:
            raise ValueError(f"there is no field {name!r}{inputs.did_you_mean(name, fields)}")
    values = PRESETS[preset] | below | overrides | {"preset": preset}
    if directory := values.get("weights"):
        values |= _published(directory, below, overrides) | overrides
    unused = idle(argparse.Namespace(**fields | values), "refused").keys() - overrides.keys()
    return Config(**{name: value for name, value in values.items() if name not in unused})


def _published(directory: str, below: dict, overrides: dict) -> dict:
    """The fields of the model in a folder of published weights, {field: value}.

    Raises ValueError where a flag, or a preset or recipe that was asked for, gives another shape.
    """
    try:
        directory = inputs.expanded(directory)
    except ValueError as error:
        raise ValueError(f"weights={error}") from None
    published = families.complete(families.settings(directory))
    named = dict(overrides)
    if "preset" in overrides or "recipe" in below:
        defaults = {field.name: field.default for field in dataclasses.fields(Config)}
        named = defaults | PRESETS[overrides.get("preset", below["preset"])] | below | overrides
    for name in families.shape_fields():
        if name in named and named[name] != published[name]:
            way_out = (
                f"leave out --{'no-' * (overrides[name] is False)}{name}"
                if name in overrides
                else "leave out the preset or the recipe"
            )
            raise ValueError(
                f"{name}={named[name]!r} is not that of the weights in {directory}, {published[name]!r}: {way_out}"
            )
    return published


def recipe_of(name: str) -> Recipe:
    """Raises ValueError for one that does not exist, with the nearest that does."""
    if name not in RECIPES:
        raise ValueError(f"recipe={name!r} does not exist{inputs.did_you_mean(name, RECIPES)}")
    return RECIPES[name]


def from_recipe(name: str, **overrides) -> Config:
    """The recipe's values, over its preset's, with `overrides` on top. Raises ValueError, as `from_preset`."""
    return _built(_flags_of(name, overrides), overrides)


def _flags_of(name: str, overrides: dict) -> dict:
    recipe = recipe_of(name)
    flags = {"preset": recipe.preset, "recipe": name, **recipe.flags}
    if overrides.get("remat", flags.get("remat")) != flags.get("remat"):
        flags.pop("remat_tensors", None)  # those of the recipe's own policy
    return flags


ABOUT_FLAGS = """In brackets are the defaults of --preset=tiny; other presets and recipes have their own.
What predicts or compiles a run takes all its flags, and ignores those on which its answer does not depend."""


def parse_flags(file: str, argv: Sequence[str] | None = None) -> Config:
    """The command line of a program, whose file it is, as a Config. Raises ValueError for a wrong flag or value."""
    parser = command.parser(file, usage="%(prog)s [--flag=value ...]")
    add_flags(parser)
    return from_args(command.arguments(parser, argv))


def add_flags(parser: argparse.ArgumentParser, groups: Collection[str] = ()) -> None:
    """Gives a parser the fields of Config as flags, those of some groups or of all."""
    parser.epilog = None if groups else ABOUT_FLAGS
    fields = {field.name: field for field in dataclasses.fields(Config)}
    for group_name, documented in _documentation().items():
        if groups and group_name.partition(" (")[0] not in groups:
            continue
        group = parser.add_argument_group(group_name)
        for name, help_text in documented.items():
            default = fields[name].default
            help_text = f"{help_text} [{default!r}]".replace("%", "%%")
            if name in _MORE:
                help_text += f": {_MORE[name]}"
            if isinstance(default, bool):
                action = argparse.BooleanOptionalAction
                group.add_argument(f"--{name}", action=action, default=argparse.SUPPRESS, help=help_text)
            else:
                metavar = type(default).__name__.upper()
                group.add_argument(
                    f"--{name}", type=type(default), metavar=metavar, default=argparse.SUPPRESS, help=help_text
                )


def from_args(args: argparse.Namespace, **defaults) -> Config:
    """The Config of parsed flags, over those of their recipe, over `defaults`; all else in `args` is ignored.

    Raises ValueError for a wrong value.
    """
    fields = [field.name for field in dataclasses.fields(Config)]
    flags = {name: value for name, value in vars(args).items() if name in fields}
    below = {"preset": "tiny", **defaults}
    if name := flags.get("recipe"):
        below |= _flags_of(name, flags)
    return _built(below, flags)


def add_run_flags(parser: argparse.ArgumentParser, topology: str, *, without_preset: str = "") -> None:
    """Gives a parser all flags of a run, and the slices to predict or compile it for; `slice_of` reads these.

    Args:
      topology: the default.
      without_preset: another default, for the default model.
    """
    group = parser.add_argument_group("machine")
    default = f"{without_preset} without --preset, else {topology}" if without_preset else topology
    group.add_argument("--topology", help=f"chips along each axis of a slice [the recipe's, else {default}]")
    group.add_argument("--num_slices", type=int, help="slices, joined by the network [the recipe's, else 1]")
    parser.set_defaults(default_topology=topology, topology_without_preset=without_preset)
    add_flags(parser)


def slice_of(args: argparse.Namespace) -> tuple[str, int]:
    """The topology and the slices of parsed flags: those given, else the recipe's, else the program's own."""
    if name := getattr(args, "recipe", ""):
        topology, num_slices = recipe_of(name).topology, recipe_of(name).num_slices
    else:
        topology, num_slices = args.default_topology, 1
        if "preset" not in args:
            topology = getattr(args, "topology_without_preset", "") or topology
    if args.num_slices is not None and args.num_slices < 1:
        raise ValueError(f"num_slices={args.num_slices} must be 1 or more")
    return topology if args.topology is None else args.topology, args.num_slices or num_slices


@functools.cache
def _documentation() -> dict[str, dict[str, str]]:
    """{group: {field: the comment above it}}, read from the source of Config."""
    groups: dict[str, dict[str, str]] = {}
    group = comment = ""
    for line in inspect.getsource(Config).splitlines():
        if heading := re.fullmatch(r"    # -- (.+)", line):
            group = heading[1]
        elif above := re.fullmatch(r"    # (.+)", line):
            comment = above[1]
        elif field := re.match(r"    (\w+): \w+ = flag\(", line):
            groups.setdefault(group, {})[field[1]] = comment
        elif line.startswith("    def "):
            break
    return groups


def main() -> None:
    for name, value in dataclasses.asdict(parse_flags(__file__)).items():
        print(f"{name:18} = {value!r}")


if __name__ == "__main__":
    command.run(main)
