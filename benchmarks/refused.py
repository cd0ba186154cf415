"""The page of refused flags: an example of each rule, and the sentence that train.py answers it with.

    python benchmarks/refused.py      writes docs/REFUSED.md

Flags are read as train.py reads them, for 8 devices that are not TPUs. tests/test_refused.py compares the page with the
code, and checks that the examples reach every `raise` of the rules.
"""

import re
import shlex
import sys
from argparse import ArgumentParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import command
import config as config_lib
import flags as flags_lib
import placement
import rules
import train

DEVICES = 8
STAR = r"\*"  # in a page, outside of code
MOE = "--preset=tiny-moe"
MLA = "--preset=tiny-mla"
SHARED = "--num_layers=4 --window=64 --global_every=2 --global_head_dim=32 --num_kv_shared_layers=2"
EXAMPLES = {
    "Flags that would have no effect": [
        "--global_every=2",
        "--rope_scaling=8",
        "--rope_original_len=4096",
        "--rope_beta_fast=16",
        "--mtp_loss=0.1",
        "--global_rope_theta=1e6",
        "--expert_dim=256",
        "--double_wide_mlp",
        "--ple_dim=16",
        "--num_kv_shared_layers=2",
        f"{MOE} --selection_bias_rate=0.01",
        f"{MOE} --moe_impl=capacity --buffer_factor=4",
        f"{MOE} --capacity_factor=2",
        f"{MOE} --swiglu_limit=7 --mlp_activation=gelu",
        "--rope_head_dim=8",
        "--window=64 --context_impl=all_gather --mesh=context:8",
        "--remat_tensors=context:device",
        "--fp8_rounding=stochastic",
        "--fp8=dynamic --fp8_block=8",
        "--fp8=dynamic --fp8_scales=scales.json",
        "--optimizer=adafactor --beta1=0.5",
        "--optimizer=sgd --mu_dtype=bfloat16",
        "--optimizer=muon --nu_dtype=bfloat16",
        "--optimizer=sgd --weight_decay=0.01",
        "--eval_batches=0 --eval_every=10",
        "--sample=0 --sample_every=10",
        "--decay_ratio=0.2",
        "--schedule=constant --final_lr_ratio=0.2",
        "--no-prefetch --double_buffer",
    ],
    "Choices that exclude each other": [
        "--offload_optimizer --optimizer=adafactor",
        "--offload_optimizer --check_every=10",
        "--dim_multiple=128 --optimizer=adafactor",
        "--qk_clip=100 --qk_norm",
        "--qk_clip=100 --max_logit=8",
        "--mesh=context:8 --context_heads=2 --collectives=ring",
        "--mesh=pipe:2,fsdp:* --pipeline_schedule=circular --num_layers=4 --microbatches=2",
        f"{MOE} --mesh=pipe:2,fsdp:* --num_layers=4 --num_dense_layers=1",
        "--mesh=pipe:2,fsdp:* --num_layers=4 --microbatches=2 --mtp",
        "--mesh=pipe:2,fsdp:* --num_layers=4 --microbatches=2 --grad_dtype=bfloat16",
        "--mesh=pipe:2,fsdp:* --num_layers=4 --microbatches=2 --remat=qkv_proj_offloaded",
        "--mtp --fp8=delayed",
        "--mesh=pipe:2,context:2,fsdp:* --num_layers=6 --window=64 --global_every=2",
        "--mesh=pipe:2,fsdp:* --num_layers=4 --window=64 --global_every=2 --global_head_dim=32",
        "--num_layers=4 --window=64 --global_every=2 --global_head_dim=32 --mtp",
        f"{SHARED} {MOE}",
        f"{SHARED} --qk_clip=100",
        "--num_layers=4 --window=64 --global_every=2 --num_kv_shared_layers=2",
        "--ple_dim=16 --post_norms --mtp",
        "--ple_dim=16 --post_norms --mesh=pipe:2,fsdp:* --num_layers=4",
        "--num_layers=4 --window=64 --global_every=2 --global_head_dim=32 --fp8=delayed",
        "--mesh=expert:8",
        "--mesh=context:8 --max_logit=8",
        "--remat=custom --remat_tensors=decoder_layer_input:remat",
        "--rope_type=yarn --rope_scaling=8 --rope_beta_fast=1",
        "--rope_fraction=2",
        "--window=64 --global_every=2 --global_rope_theta=0.5",
        f"{MLA} --qk_norm",
        f"{MLA} --num_kv_heads=4",
        "--fp8=delayed --fp8_granularity=per_axis",
        f"{MOE} --fp8=delayed",
        f"{MOE} --fp8=dynamic --fp8_granularity=per_axis",
        f"{MLA} --fp8=dynamic",
        "--fp8=dynamic --fp8_modules=moe",
        "--fp8=dynamic --fp8_skip_layers=2",
        "--fp8=dynamic --mesh=tensor:8 --collective_matmul",
        "--fp8=dynamic --fp8_granularity=block --mesh=fsdp:4,fsdp_transpose:2",
        "--fp8=delayed --mesh=pipe:2,fsdp:* --num_layers=4",
        "--attention=flash --remat=full",
        "--xla_flags=recommended",
        "--num_processes=2",
        "--num_processes=2 --process_id=0 --coordinator=localhost",
        "--num_processes=2 --coordinator=localhost:9911",
        "--profile_dir=runs/trace --steps=2",
        "--core_axis=tensor,fsdp",
        "--core_axis=tensor",
    ],
    "Sizes that do not divide": [
        "--mesh=fsdp:4",
        "--batch_rampup=0:4,100:16",
        "--mesh=fsdp:*,tensor:3",
        "--num_heads=8 --num_kv_heads=3",
        "--num_layers=4 --window=64 --global_every=3 --global_head_dim=32",
        "--num_layers=4 --window=64 --global_every=2 --global_head_dim=33",
        "--num_layers=4 --window=64 --global_every=2 --global_kv_heads=3",
        f"{SHARED} --num_kv_shared_layers=3",
        f"{SHARED} --num_kv_shared_layers=4",
        "--mesh=tensor:8 --num_kv_heads=4",
        "--mesh=fsdp:8 --model_dim=180",
        "--mesh=fsdp:2,fsdp_transpose:4 --head_dim=6",
        f"{MLA} --mesh=fsdp:8 --kv_lora_rank=20",
        f"{MOE} --mesh=expert:8 --num_experts=4",
        "--batch=12",
        "--batch=4 --mesh=fsdp:8",
        "--mesh=pipe:2,fsdp:*",
        "--mesh=pipe:2,fsdp:* --num_layers=4 --pipeline_schedule=circular --pipeline_rounds=2 --microbatches=1",
        "--mesh=context:8 --context_heads=3",
        "--mesh=context:8 --seq_len=100",
        "--mesh=context:8 --seq_len=120",
        f"{MOE} --mesh=expert:8 --moe_parts=3",
        "--mesh=context:8 --num_heads=4 --num_kv_heads=4 --context_impl=all_to_all",
        "--fp8=dynamic --fp8_granularity=block --fp8_block=64",
        "--head_dim=25",
        f"{MOE} --router_groups=3",
        f"{MOE} --router_groups=4 --experts_per_token=3",
        f"{MLA} --rope_head_dim=7",
    ],
    "Illegal values": [
        "--optimizer=lion",
        "--batch=0",
        "--beta2=1",
        "--seed=9223372036854775808",
        "--process_id=-7",
        "--fp8=dynamic --fp8_modules=attention",
        "--remat=custom --remat_tensors=contxt:device",
        "--remat=custom --remat_tensors=context:hbm",
        "--remat=custom --remat_tensors=context:offload:0.5",
        "--profile_steps=5",
        "--schedule=wsd --warmup_ratio=0.6 --decay_ratio=0.5",
        "--schedule=wsd --steps=5",
        "--batch_rampup=8,16",
        "--batch_rampup=0:8,100:8",
        "--batch_rampup=0:8,100:32",
        "--profile_dir=gs://bucket/trace",
        "--checkpoint_dir=s3://bucket/run",
        "--metrics_file=~nobody-here/metrics.jsonl",
        "--num_experts=4 --expert_dim=64",
        "--num_experts=4 --experts_per_token=1",
        "--num_experts=4 --experts_per_token=1 --expert_dim=64 --num_dense_layers=3",
        f"{MOE} --moe_impl=capacity --capacity_factor=0",
        f"{MOE} --mesh=expert:8 --buffer_factor=0",
        "--mesh=fdsp:8",
        "--mesh=fsdp:2,fsdp:4",
        "--mesh=fsdp:all",
        "--mesh=fsdp:*,data:*",
        "--core_axis=cores",
        "--preset=llama3-8b",
        "--batch_size=8",
        "batch=8",
    ],
}


def check(flags: str) -> None:
    """Runs every check that a run with these flags passes before it compiles. Raises ValueError."""
    parser = ArgumentParser(allow_abbrev=False, usage="[--flag=value ...]")
    flags_lib.add_flags(parser)
    args = command.arguments(parser, shlex.split(flags))
    config = flags_lib.from_args(args)
    sizes = placement.fill_mesh(placement.parse_mesh(config.mesh), DEVICES)
    placement.core_axis_of(sizes, config.core_axis)
    rules.check(config, sizes)
    train.check_backend(rules.settled(config, sizes), "cpu")


def refusal(flags: str) -> ValueError:
    try:
        check(flags)
    except ValueError as error:
        return error
    raise AssertionError(f"{flags} is not refused")


def ways_out(flags: str, sentence: str) -> list[str]:
    """Returns the flags after each way out that the sentence of a refusal names."""
    name = lambda flag: flag.removeprefix("--no-").removeprefix("--").partition("=")[0]
    if "did you mean --" in sentence:
        wrong = re.search(r"there is no flag '--([^'=]+)", sentence)[1]
        return [flags.replace(f"--{wrong}", flag) for flag in re.findall(r"--[\w-]+", sentence.partition("mean")[2])]
    one = r"--[\w-]+(?:=[^\s;]*[^\s;,.?])?"
    advised = re.findall(rf"{one}(?: {one})*", re.sub(r"'[^']*'", "", sentence))
    ways = []
    for way in advised:
        changed = [name(flag) for flag in way.split()]
        ways.append(shlex.join([*(flag for flag in shlex.split(flags) if name(flag) not in changed), *way.split()]))
    if near := re.match(r"(\w+)=\d+ must be a multiple of .*; nearest (?:is|are) (\d+)(?: and (\d+))?", sentence):
        others = [flag for flag in shlex.split(flags) if name(flag) != near[1]]
        ways += [shlex.join([*others, f"--{near[1]}={value}"]) for value in filter(None, near.groups()[1:])]
    if left := re.search(r"leave (\w+) at its default", sentence):
        ways.append(shlex.join(flag for flag in shlex.split(flags) if name(flag) != left[1]))
    return ways


def need_of(sentence: str) -> config_lib.Need | None:
    """Returns the need that a flag lacks, where a refusal says so."""
    flag, _, reason = sentence.partition(" has no effect: ")
    for need, names in config_lib.flags_by_need("refused").items():
        pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(need.why)) + rf"\. Use {re.escape(need.instead)}, or leave .*"
        if flag.partition("=")[0] in names and re.fullmatch(pattern, reason):
            return need
    return None


def row(flags: str) -> str:
    sentence = str(refusal(flags))
    names = config_lib.flags_by_need("refused").get(need_of(sentence), [])
    others = ", ".join(name for name in names if not sentence.startswith(f"{name}="))
    more = f". The same of {others}" if others else ""
    return f"| `{flags}` | {(sentence + more).replace('*', STAR)} |\n"


def page() -> str:
    text = f"""# Refusals

A run that is impossible, or that would differ from what its flags say, ends before anything is compiled. One or two
sentences name the value, the reason and the way out. Here is an example of every rule, with the answer of `python
train.py` on {DEVICES} simulated devices. `python benchmarks/refused.py` writes this page. The rules are in
[config.py](../config.py) and, where the mesh matters, in [rules.py](../rules.py). The predictions and the planner of
`roofline.py` apply them as well.
"""
    for heading, examples in EXAMPLES.items():
        text += f"\n## {heading}\n\n| flags | refused |\n|---|---|\n"
        text += "".join(map(row, examples))
    return text


def main() -> None:
    command.arguments(command.parser(__file__))
    (ROOT / "docs/REFUSED.md").write_text(page())


if __name__ == "__main__":
    command.run(main)
