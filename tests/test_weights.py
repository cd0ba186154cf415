"""Tests published weights: the values of each tensor, shards, the bytes that are read, and folders that are refused."""

import dataclasses
import json
import operator
import shutil
import struct
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import support
from safetensors.numpy import load_file, save_file

import anatomy
import checkpoint
import checksums
import corpora
import data
import families
import flags
import parameters
import placement
import reference
import sharding
import tensor_files
import train
import weights
from benchmarks import import_weights
from config import Config

SMALL = dict(
    vocab_size=32, num_layers=2, model_dim=16, ff_dim=24, num_heads=4, num_kv_heads=2, head_dim=8, seq_len=8, batch=8
)
MOE = dict(num_experts=4, experts_per_token=2, expert_dim=8)
LATENT = dict(kv_lora_rank=8, rope_head_dim=4, value_head_dim=6, num_kv_heads=4, norm_eps=1e-6, num_dense_layers=1)
DEEPSEEK = SMALL | MOE | LATENT | dict(num_shared_experts=2, renormalise=False, router_scale=1.5)
YARN = dict(rope_type="yarn", rope_scaling=4.0, rope_original_len=64)
LLAMA3 = dict(rope_type="llama3", rope_scaling=8.0, rope_original_len=64)
GEMMA = dict(mlp_activation="gelu", post_norms=True, embedding_scale=True, tied_embeddings=True)
GEMMA |= dict(window=4, global_every=2)
GEMMA4 = GEMMA | dict(qk_norm=True, value_norm=True, keys_as_values=True, layer_scale=True, attention_scale=1.0)
GEMMA4 |= dict(global_head_dim=16, global_kv_heads=1, global_rope_theta=1e6, rope_fraction=0.25, num_layers=4)
GEMMA4_SMALL = GEMMA4 | dict(keys_as_values=False, global_kv_heads=0, num_kv_shared_layers=2, double_wide_mlp=True)
GEMMA4_SMALL |= dict(ple_dim=8)
GEMMA4_MOE = GEMMA4 | MOE | dict(num_shared_experts=3, ff_dim=24, expert_norms=True, expert_scale=True)
MODELS = {
    "llama": SMALL | LLAMA3 | dict(tied_embeddings=True, qkv_bias=True, output_bias=True),
    "mistral": SMALL | dict(window=4),
    "qwen2": SMALL | dict(qkv_bias=True),
    "qwen3": SMALL | dict(qk_norm=True, window=4, global_every=2),
    "qwen3_moe": SMALL | MOE | dict(qk_norm=True, num_dense_layers=1),
    "mixtral": SMALL | MOE,
    "deepseek_v2": DEEPSEEK | YARN | dict(rope_mscale=0.5, rope_mscale_all_dim=0.5),
    "deepseek_v3": DEEPSEEK
    | dict(q_lora_rank=12, router_scores="sigmoid", selection_bias=True, router_groups=2, renormalise=True),
    "gemma2": SMALL | GEMMA | dict(attention_soft_cap=50.0, logit_soft_cap=30.0),
    "gemma3_text": SMALL
    | GEMMA
    | dict(qk_norm=True, global_rope_theta=1e6, rope_type="linear", rope_scaling=8.0, attention_scale=12**-0.5),
    "gemma4_text": SMALL | GEMMA4,
    "gemma4_text, shared keys": SMALL | GEMMA4_SMALL,
    "gpt_oss": SMALL
    | MOE
    | YARN
    | dict(qkv_bias=True, output_bias=True, attention_sinks=True, expert_bias=True, swiglu_limit=7.0)
    | dict(window=4, global_every=2, rope_truncate=False),
}


def model(name: str, **more) -> Config:
    return Config(**MODELS[name] | more)


def mesh_of(sizes: str = "fsdp:1"):
    sizes = placement.parse_mesh(sizes)
    return sharding.make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])


def exported(directory: Path, config: Config, **options) -> tuple[parameters.Params, str]:
    """Random parameters, and the folder with them in float32. They are multiples of 2^-12: without 1 they are exact."""
    rng = np.random.default_rng(0)
    draw = lambda a: np.round(rng.standard_normal(a.shape, np.float32) * 4096) / np.float32(4096)
    params = jax.tree.map(draw, parameters.param_shapes(config))
    weights.export(params, config, str(directory), **dict(dtype="float32") | options)
    return params, str(directory)


def equal(tree, other) -> bool:
    return all(map(np.array_equal, *map(jax.tree.leaves, (tree, other)))) and len(jax.tree.leaves(tree)) > 8


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_comes_back_with_the_same_bits(name, tmp_path):
    config = model(name)
    params, folder = exported(tmp_path / "a", config)
    fields = weights.settings(folder)
    assert json.loads((tmp_path / "a/config.json").read_text())["model_type"] == name.partition(",")[0]
    assert all(getattr(config, field) == value for field, value in fields.items() if field != "ff_dim")
    loaded = weights.load(folder, dataclasses.replace(config, **fields), mesh_of())
    assert equal(params, loaded)
    weights.export(jax.tree.map(np.asarray, loaded), config, str(tmp_path / "b"), "float32")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def attention(w, p, i: int, config: Config) -> dict[str, np.ndarray]:
    """The published tensors of grouped-query attention, made from ours."""
    D = config.model_dim
    tensors = {f"{p}.o_proj.weight": np.asarray(w.w_o[i]).reshape(-1, D).T}
    for letter, matrix, bias in (("q", w.w_q, w.bias_q), ("k", w.w_k, w.bias_k), ("v", w.w_v, w.bias_v)):
        tensors[f"{p}.{letter}_proj.weight"] = np.asarray(matrix[i]).reshape(D, -1).T
        if bias is not None:
            tensors[f"{p}.{letter}_proj.bias"] = np.asarray(bias[i]).reshape(-1)
    return tensors


def test_tensors_of_a_dense_model_are_transposed_matrices(tmp_path):
    config = model("llama")
    params, folder = exported(tmp_path, config)
    tensors, w = load_file(f"{folder}/model.safetensors"), params.layers
    for i in range(config.num_layers):
        p = f"model.layers.{i}"
        wanted = attention(w, f"{p}.self_attn", i, config) | {
            f"{p}.self_attn.o_proj.bias": w.bias_o[i],
            f"{p}.input_layernorm.weight": w.norm_attention[i],
            f"{p}.post_attention_layernorm.weight": w.norm_mlp[i],
            f"{p}.mlp.gate_proj.weight": w.w_gate[i].T,
            f"{p}.mlp.up_proj.weight": w.w_up[i].T,
            f"{p}.mlp.down_proj.weight": w.w_down[i].T,
        }
        for name, value in wanted.items():
            assert np.array_equal(tensors.pop(name), value), name
    wanted = {"model.embed_tokens.weight": params.embed, "model.norm.weight": params.norm}
    assert tensors.keys() == wanted.keys() and all(np.array_equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_norms_of_gemma_are_without_their_one(name, tmp_path):
    params, folder = exported(tmp_path, model(name))
    tensors, w = load_file(f"{folder}/model.safetensors"), params.layers
    norms = dict(input_layernorm=w.norm_attention, post_attention_layernorm=w.norm_attention_out)
    norms |= dict(pre_feedforward_layernorm=w.norm_mlp, post_feedforward_layernorm=w.norm_mlp_out)
    norms |= {"self_attn.q_norm": w.norm_q, "self_attn.k_norm": w.norm_k} if name == "gemma3_text" else {}
    for part, ours in norms.items():
        assert np.array_equal(tensors[f"model.layers.1.{part}.weight"], ours[1] - 1), part
    assert np.array_equal(tensors["model.norm.weight"], params.norm - 1)


def test_the_multi_token_prediction_module_of_deepseek_is_one_more_layer(tmp_path, capsys):
    """Its copies of the embedding and the unembedding are skipped, and all of it without --mtp."""
    config = model("deepseek_v3", mtp=True, mesh="fsdp:4,expert:2")
    params, folder = exported(tmp_path, config)
    tensors, D = load_file(f"{folder}/model.safetensors"), config.model_dim
    joined = tensors["model.layers.2.eh_proj.weight"]
    assert np.array_equal(joined[:, :D], params.w_mtp_embed.T) and np.array_equal(joined[:, D:], params.w_mtp_hidden.T)
    assert np.array_equal(tensors["model.layers.2.shared_head.norm.weight"], params.norm_mtp)
    assert np.array_equal(tensors["model.layers.2.mlp.gate.weight"], params.mtp_layers.w_router[0].T)
    copies = dict(zip(("embed_tokens", "shared_head.head"), (params.embed, params.unembed), strict=True))
    copies = {f"model.layers.2.{name}.weight": value for name, value in copies.items()}
    assert all(np.array_equal(tensors.pop(name), value) for name, value in copies.items())
    save_file(tensors, f"{folder}/model.safetensors")  # a folder may lack them
    assert equal(params, weights.load(folder, config, mesh_of(config.mesh)))
    assert flags.parse_flags("train.py", [f"--weights={folder}", "--mtp"]).mtp
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    without = dataclasses.replace(config, mtp=False)
    shared = {name: getattr(params, name) for name in ("embed", "layers", "norm", "unembed", "dense_layers")}
    assert equal(parameters.Params(**shared), weights.load(folder, without, mesh_of(config.mesh)))
    save_file(tensors | copies, f"{folder}/model.safetensors")
    weights.show(folder)
    note = "note       skipped, as without --mtp the multi-token prediction module is not trained: model.layers.2."
    assert f"{note}eh_proj.weight and 31 more\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="LlamaForCausalLM has no weight norm_mtp_embed, which this model has"):
        exported(tmp_path / "other", model("llama", mtp=True))


def test_experts_of_gpt_oss_alternate_gate_and_up(tmp_path):
    config = model("gpt_oss")
    params, folder = exported(tmp_path, config)
    tensors, w = load_file(f"{folder}/model.safetensors"), params.layers
    by_expert = lambda matrix: np.asarray(matrix[1]).reshape(config.num_experts, config.model_dim, -1)
    p = "model.layers.1.mlp.experts"
    assert np.array_equal(tensors[f"{p}.gate_up_proj"][..., 0::2], by_expert(w.expert_gate))
    assert np.array_equal(tensors[f"{p}.gate_up_proj"][..., 1::2], by_expert(w.expert_up))
    assert np.array_equal(tensors[f"{p}.gate_up_proj_bias"][:, 1::2], w.bias_expert_up[1])
    assert np.array_equal(tensors[f"{p}.down_proj"], by_expert(w.expert_down).transpose(0, 2, 1))
    assert np.array_equal(tensors["model.layers.1.mlp.router.weight"], w.w_router[1].T)


def test_latent_attention_of_deepseek_is_joined_and_has_adjacent_pairs(tmp_path):
    config = model("deepseek_v3")
    params, folder = exported(tmp_path, config)
    tensors, w, R = load_file(f"{folder}/model.safetensors"), params.layers, config.rope_head_dim
    p = "model.layers.1.self_attn"  # layer 0 is dense
    up = tensors[f"{p}.kv_b_proj.weight"].reshape(config.num_heads, -1, config.kv_lora_rank)
    assert np.array_equal(up[:, : config.head_dim], np.asarray(w.w_k_up[0]).transpose(1, 2, 0))
    assert np.array_equal(up[:, config.head_dim :], np.asarray(w.w_v_up[0]).transpose(1, 2, 0))
    down = tensors[f"{p}.kv_a_proj_with_mqa.weight"]
    assert np.array_equal(down[: config.kv_lora_rank], w.w_kv_down[0].T)
    rotary = down[config.kv_lora_rank :]
    assert np.array_equal(np.concatenate([rotary[0::2], rotary[1::2]]), w.w_k_rope[0].T)
    query = tensors[f"{p}.q_b_proj.weight"].reshape(config.num_heads, -1, config.q_lora_rank)
    ours = np.asarray(w.w_q_up[0]).transpose(1, 2, 0)
    assert np.array_equal(query[:, :-R], ours[:, :-R])
    assert np.array_equal(query[:, -R::2], ours[:, -R : -R // 2]) and np.array_equal(
        query[:, -R + 1 :: 2], ours[:, -R // 2 :]
    )
    assert np.array_equal(tensors["model.layers.1.mlp.gate.e_score_correction_bias"], w.selection_bias[0])
    expert = np.asarray(w.expert_down[0]).reshape(config.num_experts, config.model_dim, -1)[3]
    assert np.array_equal(tensors["model.layers.1.mlp.experts.3.down_proj.weight"], expert)


# -- shards


MESHES = {
    "llama": "data:2,fsdp:2,tensor:2",
    "qwen3_moe": "fsdp:2,expert:4",
    "deepseek_v3": "expert:2,fsdp:4",
    "gpt_oss": "expert:2,fsdp:2,tensor:2",
}


@pytest.mark.parametrize("name", MESHES)
def test_shards_on_eight_devices_are_those_of_the_arrays(name, tmp_path):
    config = model(name, mesh=MESHES[name])
    params, folder = exported(tmp_path, config)
    mesh = mesh_of(config.mesh)
    loaded = weights.load(folder, config, mesh)
    assert equal(params, loaded)
    for spec, array in zip(jax.tree.leaves(parameters.param_specs(config)), jax.tree.leaves(loaded), strict=True):
        assert array.sharding == jax.sharding.NamedSharding(mesh, spec)
    if name == "llama":
        weights.export(loaded, config, str(tmp_path / "again"), "float32")
        assert (tmp_path / "again/model.safetensors").read_bytes() == Path(folder, "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_block_is_read_without_the_bytes_around_it(name, tmp_path):
    """Counts the bytes that the device with the last shard of each weight reads, and compares them with its shards."""
    config = model(name, mesh=MESHES[name])
    _, folder = exported(tmp_path, config)
    mesh, rows = mesh_of(config.mesh), weights._rows(families.FAMILIES[name])
    specs = parameters.param_specs(config)
    with tensor_files.Folder(folder) as opened:
        for path, ours, layers in weights._stacks(config):
            shape, spec = map(operator.attrgetter(path), (parameters.param_shapes(config), specs))
            layout = jax.sharding.NamedSharding(mesh, spec)
            index = layout.devices_indices_map(shape.shape)[mesh.devices.flat[-1]]
            ranges = tuple(each.indices(size)[:2] for each, size in zip(index, shape.shape, strict=True))
            before = opened.bytes_read
            block = weights._blocks(opened, rows[ours], path, layers, [ranges], config)[ranges]
            assert opened.bytes_read - before == block.nbytes == 4 * np.prod(layout.shard_shape(shape.shape))


def test_replicas_of_a_shard_are_read_once(tmp_path, monkeypatch):
    config = model("qwen3", mesh="data:8")
    params, folder = exported(tmp_path, config)
    read = []
    leave = tensor_files.Folder.__exit__
    monkeypatch.setattr(tensor_files.Folder, "__exit__", lambda self, *_: (read.append(self.bytes_read), leave(self)))
    assert equal(params, weights.load(folder, config, mesh_of("data:8")))
    assert read == [sum(array.nbytes for array in jax.tree.leaves(params))]


@pytest.mark.parametrize("fp8", [False, True])
def test_one_host_of_eight_reads_an_eighth(fp8, tmp_path):
    """benchmarks/import_weights.py measures the same. The scales of FP8 are read by every host."""
    small = dict(vocab_size=64, model_dim=128, ff_dim=256, num_heads=8, num_kv_heads=8, head_dim=16)
    stored = import_weights.make(str(tmp_path), Config(**small, num_layers=2, tied_embeddings=True), fp8)
    one, all_of_them = (import_weights.measure(str(tmp_path), "fsdp:8", n, export=True) for n in (1, 8))
    scales = 2 * 4 * (4 * 1 + 3 * 2) if fp8 else 0
    assert (one["bytes_read"] - scales) * 8 == stored - scales and all_of_them["bytes_read"] == stored
    assert one["shard_bytes"] * 8 == all_of_them["shard_bytes"] and "export_s" not in one
    text = import_weights.report(all_of_them | dict(stored_bytes=stored))
    assert [line.split()[0] for line in text.splitlines()] == ["stored", "time", "memory", "export"]


# -- a training that starts from them


def test_flags_take_the_model_of_a_folder(tmp_path):
    _, folder = exported(tmp_path, model("qwen3_moe"))
    config = flags.from_preset("tiny", weights=folder, seq_len=16)
    assert {name: getattr(config, name) for name in families.model_fields()} == {
        name: getattr(model("qwen3_moe"), name) for name in families.model_fields()
    }
    assert (config.weights, config.seq_len, config.preset) == (folder, 16, "tiny")
    assert flags.parse_flags("train.py", [f"--weights={folder}", "--rope_theta=5e5"]).rope_theta == 5e5
    assert flags.parse_flags("train.py", [f"--weights={folder}", "--num_layers=2"]).num_layers == 2


@pytest.mark.parametrize(
    "given, message",
    [
        (["--num_layers=3"], "num_layers=3 is not that of the weights in .*, 2: leave out --num_layers"),
        (["--no-qk_norm"], "qk_norm=False is not that of the weights in .*, True: leave out --no-qk_norm"),
        (["--preset=tiny"], "vocab_size=256 is not that of the weights in .*, 32: leave out the preset or the recipe"),
        (["--recipe=llama3.1-70b-8k-bf16"], "vocab_size=128256 is not .* leave out the preset or the recipe"),
        (["--weights=/nowhere"], "/nowhere has no config.json: it must be a folder of published weights"),
        (["--weights=gs://bucket/x"], "weights='gs://bucket/x' must be a path of this machine"),
    ],
)
def test_flags_of_another_shape_are_refused(given, message, tmp_path):
    _, folder = exported(tmp_path, model("qwen3"))
    with pytest.raises((ValueError, OSError), match=message):
        flags.parse_flags("train.py", [f"--weights={folder}", *given])


def test_a_value_that_a_flag_overrides_is_noted(tmp_path):
    _, folder = exported(tmp_path, model("qwen3"))
    config = flags.parse_flags("train.py", [f"--weights={folder}", "--rope_theta=5e5"])
    identity, notes = weights.examined(folder, config)
    assert notes == ["overrides config.json, which has rope_theta=10000.0, and this model rope_theta=500000.0"]
    assert weights.examined(folder, model("qwen3")) == (identity, [])


def test_a_state_starts_from_the_weights_with_a_fresh_optimizer(tmp_path):
    config = model("llama", mesh="fsdp:4,tensor:2", weights=str(tmp_path))
    params, _ = exported(tmp_path, config)
    mesh = mesh_of(config.mesh)
    state, drawn = train.read_state(config, mesh), train.drawn_state(config, mesh)
    assert equal(params, state.params) and jax.tree.structure(state) == jax.tree.structure(drawn)
    assert jax.tree.map(lambda a: a.sharding, state) == jax.tree.map(lambda a: a.sharding, drawn)
    rest = lambda state: jax.tree.leaves(dataclasses.replace(state, params=None))
    assert all(map(np.array_equal, rest(state), rest(drawn)))


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    yield from support.run_values(tmp_path_factory.mktemp("weights"))


def of_a_run(values: dict, folder: str, **more) -> Config:
    shapes = families.model_fields()
    return flags.from_preset("tiny", **{k: v for k, v in values.items() if k not in shapes}, weights=folder, **more)


@pytest.mark.slow
def test_a_run_starts_from_the_weights_and_resumes_from_its_checkpoint(values, tmp_path, capsys):
    config = model("llama", vocab_size=256, seq_len=32)
    params, folder = exported(tmp_path / "w", config)
    run = of_a_run(values, folder, steps=2, checkpoint_dir=str(tmp_path / "c"), metrics_file=str(tmp_path / "m"))
    train.run(run)
    first = json.loads((tmp_path / "m").read_text().splitlines()[0])
    batch = data.train_batch(corpora.open_corpus(run.corpus), 0, batch=run.batch, seq_len=run.seq_len, seed=run.seed)
    assert first["loss"] == pytest.approx(float(reference.loss(params, batch, run)), rel=1e-5)
    out = capsys.readouterr().out
    assert f"model      {folder}: " in out and "the state read in " in out
    read = tensor_files.Folder.read
    try:  # a run that resumes reads no weights
        del tensor_files.Folder.read
        train.run(dataclasses.replace(run, steps=3))
    finally:
        tensor_files.Folder.read = read
    assert "resumed    from step 2" in capsys.readouterr().out
    exported(tmp_path / "other", config, dtype="bfloat16")
    for file in (tmp_path / "other").iterdir():
        shutil.copy(file, tmp_path / "w")
    with pytest.raises(ValueError, match=f"--weights={folder} has another content .* than when the checkpoint"):
        train.run(dataclasses.replace(run, steps=4))


# -- quantised folders


def fp8_of(value: np.ndarray, block: int) -> dict[str, np.ndarray]:
    """{suffix: array}: a matrix with a scale for each block, by another formula than the one under test."""
    repeat = lambda scales: np.kron(scales, np.ones((block, block), np.float32))[: value.shape[0], : value.shape[1]]
    scales = np.random.default_rng(1).random([-(-size // block) for size in value.shape]).astype(np.float32) + 0.5
    stored = (value / repeat(scales)).astype(ml_dtypes.float8_e4m3fn)
    return {"": stored, "_scale_inv": scales, "value": stored.astype(np.float32) * repeat(scales)}


def mxfp4_of(value: np.ndarray) -> dict[str, np.ndarray]:
    """The same for the matrices of experts [E, K, J]: random nibbles, scales of 1/4 to 4."""
    experts, summed, other = value.shape
    rng, groups = np.random.default_rng(value.size), (experts, other, summed // 32)
    nibbles, scales = rng.integers(0, 16, (*groups, 32)), rng.integers(125, 130, groups)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibbles % 8] * np.where(nibbles < 8, 1, -1)
    values = (values * 2.0 ** (scales[..., None] - 127)).reshape(experts, other, summed).transpose(0, 2, 1)
    packed = nibbles[..., 0::2] + 16 * nibbles[..., 1::2]
    return {
        "_blocks": packed.astype(np.uint8),
        "_scales": scales.astype(np.uint8),
        "value": np.ascontiguousarray(values, np.float32),
    }


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_a_quantised_folder_is_read_into_shards(name, tmp_path):
    """Compares with the folder of the same values in float32."""
    wide = dict(model_dim=64, expert_dim=32, ff_dim=32)
    config = model(name, mesh="expert:2,fsdp:2,tensor:2", **wide)
    _, folder = exported(tmp_path / "plain", config)
    plain, stored = load_file(f"{folder}/model.safetensors"), {}
    for tensor in [*plain]:
        is_fp8 = name == "deepseek_v3" and tensor.endswith("proj.weight")
        is_mxfp4 = tensor.endswith(("gate_up_proj", "down_proj"))
        parts = fp8_of(plain[tensor], 16) if is_fp8 else mxfp4_of(plain[tensor]) if is_mxfp4 else {}
        plain[tensor] = parts.pop("value", plain[tensor])
        stored |= {f"{tensor}{suffix}": part for suffix, part in parts.items()} or {tensor: plain[tensor]}
    save_file(plain, f"{folder}/model.safetensors")
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    kinds = {"float8_e4m3fn": "F8_E4M3", "uint8": "U8", "float32": "F32"}
    new = [tensor_files.New(tensor, kinds[part.dtype.name], part.shape) for tensor, part in stored.items()]
    tensor_files.write(quantised, new, lambda tensor: stored[tensor.name], 10**9)
    shutil.copy(f"{folder}/config.json", quantised)
    fp8 = dict(quant_method="fp8", weight_block_size=[16, 16])
    method = fp8 if name == "deepseek_v3" else dict(quant_method="mxfp4")
    changed_values(str(quantised), quantization_config=method)
    assert len(stored) > len(plain)
    wanted = weights.load(folder, config, mesh_of())
    assert equal(wanted, weights.load(str(quantised), config, mesh_of(config.mesh)))


# -- dtypes and files


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_as_float32(dtype, tmp_path):
    config = model("qwen3")
    params, folder = exported(tmp_path, config)
    tensors = load_file(f"{folder}/model.safetensors")
    save_file({name: value.astype(dtype) for name, value in tensors.items()}, f"{folder}/model.safetensors")
    loaded = weights.load(folder, config, mesh_of())
    assert equal(jax.tree.map(lambda a: np.asarray(a).astype(dtype).astype(np.float32), params), loaded)


def test_an_export_in_bfloat16_is_rounded_to_the_nearest_but_for_the_selection_bias(tmp_path):
    config = model("deepseek_v3")
    params, folder = exported(tmp_path, config, dtype="bfloat16")
    tensors = load_file(f"{folder}/model.safetensors")
    assert np.array_equal(tensors["model.norm.weight"], np.asarray(params.norm).astype(ml_dtypes.bfloat16))
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == np.float32 and np.array_equal(bias, params.layers.selection_bias[0])


def test_a_large_model_is_in_several_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARD_BYTES", 4000)
    config = model("llama")
    params, folder = exported(tmp_path, config)
    index = json.loads((tmp_path / tensor_files.INDEX).read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert (
        files == sorted({*index["weight_map"].values()}) and len(files) > 3 and files[0].startswith("model-00001-of-")
    )
    for file in files:
        tensors = load_file(tmp_path / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == tensors.keys()
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 4000
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in jax.tree.leaves(params))
    assert equal(params, weights.load(folder, config, mesh_of()))


def test_a_folder_that_is_not_empty_is_not_written_to(tmp_path):
    config = model("llama")
    _, folder = exported(tmp_path / "a", config)
    with pytest.raises(ValueError, match="a is there already, and is not empty: name a new folder"):
        exported(Path(folder), config)


def test_show_prints_what_a_folder_holds(tmp_path, capsys):
    config = model("mixtral")
    params, folder = exported(tmp_path, config)
    weights.show(folder)
    out = capsys.readouterr().out
    assert out.startswith("family     mixtral: MixtralForCausalLM\n") and "--num_experts=4" in out
    assert f"parameters {sum(array.size for array in jax.tree.leaves(params)):,}" in out


def test_a_mixture_of_gemma_4_comes_back_with_the_same_bits(tmp_path):
    """Its dense MLP is beside the experts. The published router multiplies by D^-0.5, which is 1/4 here."""
    config = Config(**SMALL | GEMMA4_MOE, mesh="expert:2,fsdp:4")
    params, folder = exported(tmp_path, config)
    assert equal(params, weights.load(folder, config, mesh_of(config.mesh)))
    tensors, w, local = load_file(f"{folder}/model.safetensors"), params.global_layers, params.layers
    p = "model.layers.3"  # the second global layer; 2 is the second local one
    assert np.array_equal(tensors[f"{p}.router.proj.weight"], 4 * w.w_router[1].T)
    assert np.array_equal(tensors[f"{p}.mlp.up_proj.weight"], w.shared_up[1].T)
    gate_up = tensors[f"{p}.experts.gate_up_proj"]
    assert np.array_equal(gate_up[:, config.expert_dim :], w.expert_up[1].reshape(4, 16, 8).transpose(0, 2, 1))
    assert tensors[f"{p}.self_attn.k_proj.weight"].shape == (16, 16) and f"{p}.self_attn.v_proj.weight" not in tensors
    assert np.array_equal(tensors["model.layers.2.self_attn.v_proj.weight"], local.w_v[1].reshape(16, -1).T)
    assert np.array_equal(tensors[f"{p}.layer_scalar"], w.layer_scale[1:2])


def wrapped(folder: str, kind: str, prefix: str, **more) -> None:
    """Makes a folder of a text model one of images and text, as published: another config.json, other names."""
    file = Path(folder, "config.json")
    text = {key: value for key, value in json.loads(file.read_text()).items() if key != "architectures"}
    text["use_bidirectional_attention"] = "vision"  # as Gemma 4 has it
    values = dict(architectures=[families.WRAPPERS[kind].architecture], model_type=kind, text_config=text)
    file.write_text(json.dumps(values | dict(vision_config=dict(hidden_size=8), boi_token_index=3) | more))
    tensors = load_file(f"{folder}/model.safetensors")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    renamed["vision_tower.layer.weight"] = np.zeros((2, 2), np.float32)
    save_file(renamed, f"{folder}/model.safetensors")


def test_keys_of_layers_that_share_others_are_skipped(tmp_path):
    """Published files may have them, and transformers ignores them; in another layer they would be an error."""
    config = Config(**SMALL | GEMMA4_SMALL)
    params, folder = exported(tmp_path, config)
    file = f"{folder}/model.safetensors"
    unused = {f"model.layers.{i}.self_attn.k_proj.weight": np.zeros((2, 2), np.float32) for i in (2, 3)}
    save_file(load_file(file) | unused, file)
    said = "their layers share the keys and values of another one"
    assert weights.examined(folder, config)[1] == [
        f"skipped, as {said}: model.layers.2.self_attn.k_proj.weight and 1 more"
    ]
    assert equal(weights.load(folder, config, mesh_of()), params)
    save_file(load_file(file) | {"model.layers.4.self_attn.k_proj.weight": np.zeros((2, 2), np.float32)}, file)
    with pytest.raises(ValueError, match=r"model\.layers\.4\.self_attn\.k_proj\.weight"):
        weights.examined(folder, config)


@pytest.mark.parametrize(
    "kind, prefix",
    [
        ("gemma3", "language_model.model."),
        ("gemma3", "model.language_model."),
        ("gemma4", "model.language_model."),
    ],
)
def test_the_text_model_in_a_model_of_images_is_read(kind, prefix, tmp_path):
    """transformers 5.24 computes the logits of ours from such folders that it has written, to 1e-6."""
    config = model(f"{kind}_text")
    params, folder = exported(tmp_path, config)
    identity, before = weights.examined(folder, config)
    wrapped(folder, kind, prefix)
    assert families.differing(weights.settings(folder), config) == {} and before == []
    other, notes = weights.examined(folder, config)
    assert other != identity and notes == ["skipped, as only the text model is read: vision_tower.layer.weight"]
    assert equal(weights.load(folder, config, mesh_of()), params)


@pytest.mark.parametrize(
    "more, message",
    [
        (dict(mystery=2), "has mystery=2, which this program does not know"),
        (dict(architectures=["Gemma3ForCausalLM"]), "has only architectures="),
        (dict(text_config=None), "has no text_config: it must be an object"),
        (dict(text_config=dict(model_type="llama")), "text_config has model_type='llama'"),
        (dict(text_config=dict(hidden_size=16, images=1)), "has no num_hidden_layers"),
    ],
)
def test_a_model_of_images_with_another_text_model_is_refused(more, message, tmp_path):
    folder = exported(tmp_path, model("gemma3_text"))[1]
    wrapped(folder, "gemma3", "language_model.model.", **more)
    with pytest.raises(ValueError, match=message):
        weights.settings(folder)


def test_every_row_is_of_a_weight_of_this_project():
    for name, family in families.FAMILIES.items():
        assert {row.ours for row in family.rows} <= anatomy.WEIGHTS.keys()
        assert len({row.ours for row in family.rows}) == len(family.rows), name


# -- the export of a checkpoint


class Memory:
    """Stands for checkpoint.Stored: the arrays of `params`, with the checksums that a save computes."""

    path, step = "a checkpoint", 7

    def __init__(self, params, config: Config):
        self.params, self.values, self.reads = params, dataclasses.asdict(config), []
        named = jax.tree.leaves_with_path(dict(params=params))
        name_of = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
        self.sums = {name_of(path): checksums.checksum_of_block(array, 0) for path, array in named}

    def read(self, name, starts, sizes):
        block = operator.attrgetter(name)(self)[tuple(map(lambda a, n: slice(a, a + n), starts, sizes))]
        self.reads.append(block.size)
        return block


@pytest.mark.parametrize("block_bytes", [2**20, 1500, 1])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_a_checkpoint_is_exported_in_blocks_each_read_once(name, block_bytes, tmp_path, monkeypatch):
    config = model(name)
    params, folder = exported(tmp_path / "a", config)
    memory = Memory(params, config)
    monkeypatch.setattr(weights, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(checkpoint, "stored", lambda directory: memory)
    weights.export_checkpoint("runs/1", str(tmp_path / "b"), "float32")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / file).read_bytes() == Path(folder, file).read_bytes()
    assert sum(memory.reads) == sum(array.size for array in jax.tree.leaves(params))
    assert len(memory.reads) > len(jax.tree.leaves(params)) or block_bytes == 2**20
    memory.sums["params.layers.w_o"] ^= 1
    with pytest.raises(
        OSError, match=r"a checkpoint is damaged: params.layers.w_o is not what was saved, by its check"
    ):
        weights.export_checkpoint("runs/1", str(tmp_path / "c"), "float32")
    assert not (tmp_path / "c/config.json").exists()


@pytest.mark.parametrize("name", ["deepseek_v3", "llama"])
def test_a_checkpoint_is_exported_with_multi_token_prediction_or_says_so(name, tmp_path, monkeypatch, capsys):
    config = model(name, mtp=True)
    params = jax.tree.map(lambda a: np.full(a.shape, 0.5, np.float32), parameters.param_shapes(config))
    monkeypatch.setattr(checkpoint, "stored", lambda directory: Memory(params, config))
    weights.export_checkpoint("runs/1", str(tmp_path / "a"), "float32")
    said = ", without multi-token prediction, which LlamaForCausalLM does not have"
    assert (said in capsys.readouterr().out) == (name == "llama")
    if name == "deepseek_v3":
        weights.export(params, config, str(tmp_path / "b"), "float32")
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_an_export_is_like_the_folder_that_the_training_began_from(tmp_path, monkeypatch):
    params, folder = exported(tmp_path / "a", config := model("mistral", window=0))
    changed_values(folder, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None)
    changed_values(folder, bos_token_id=3, max_position_embeddings=99, transformers_version="4", attention_bias=None)
    stored = Memory(params, config)
    monkeypatch.setattr(checkpoint, "stored", lambda directory: stored)
    for began_from, like in ((folder, ""), ("", folder)):
        stored.values["weights"], out = began_from, tmp_path / f"b{like != ''}"
        weights.export_checkpoint("runs/1", str(out), "bfloat16", like)
        values = json.loads((out / "config.json").read_text())
        assert (values["model_type"], values["bos_token_id"], values["max_position_embeddings"]) == ("mistral", 3, 99)
        assert "transformers_version" not in values and values["torch_dtype"] == "bfloat16"
    stored.values["weights"] = str(tmp_path / "gone")
    weights.export_checkpoint("runs/1", str(tmp_path / "c"), "bfloat16")
    assert json.loads((tmp_path / "c/config.json").read_text())["model_type"] == "llama"


@pytest.mark.slow
def test_the_newest_checkpoint_is_exported(tmp_path, capsys):
    config = model("llama", mesh="fsdp:8", checkpoint_dir=str(tmp_path / "c"))
    params, folder = exported(tmp_path / "a", config)
    mesh = mesh_of(config.mesh)
    with pytest.raises(FileNotFoundError, match="c has no checkpoint: it must be the --checkpoint_dir of a run"):
        weights.export_checkpoint(config.checkpoint_dir, str(tmp_path / "b"), "float32")
    with checkpoint.opened(config) as checkpoints:
        other = jax.tree.map(lambda a: a + 1, params)
        for step, each in ((1, other), (2, params)):
            checkpoint.save(checkpoints, step, support.first_state(config, mesh, each), config)
    weights.export_checkpoint(config.checkpoint_dir, str(tmp_path / "b"), "float32")
    assert (tmp_path / "b/model.safetensors").read_bytes() == Path(folder, "model.safetensors").read_bytes()
    assert capsys.readouterr().out == f"exported   step 2 of {tmp_path}/c to {tmp_path}/b, in float32\n"
    data_files = [path for path in (tmp_path / "c/2/state").rglob("*") if path.is_file() and path.stat().st_size > 2000]
    for path in data_files:
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(OSError, match=r"the checkpoint .*c/2 is damaged"):
        weights.export_checkpoint(config.checkpoint_dir, str(tmp_path / "d"), "float32")
    assert not (tmp_path / "d/config.json").exists()


# -- folders of another model


def changed_tensors(folder: str, change) -> None:
    tensors = load_file(f"{folder}/model.safetensors")
    change(tensors)
    save_file(tensors, f"{folder}/model.safetensors")


def changed_values(folder: str, **changes) -> None:
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


UP = "model.layers.1.mlp.up_proj.weight"
FP8 = dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
BIAS = "model.layers.1.self_attn.q_proj.bias"


def with_dtype(folder: str, name: str, dtype: str, scales: tuple[int, ...] | None = None) -> None:
    """Gives a tensor bytes in a dtype that the package cannot write from numpy, and the scales of an FP8 tensor."""
    tensors = load_file(f"{folder}/model.safetensors")
    tensors[name] = np.zeros(tensors[name].shape, np.int64 if dtype == "I64" else np.uint8)
    if scales:
        tensors[f"{name}_scale_inv"] = np.ones(scales, np.float32)
    save_file(tensors, file := f"{folder}/model.safetensors")
    content = Path(file).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].replace(b'"dtype":"U8"', f'"dtype":"{dtype}"'.encode())
    Path(file).write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


REFUSED = {
    "a missing tensor": (
        lambda folder: changed_tensors(folder, lambda tensors: tensors.pop(UP)),
        f"has no {UP}, which config.json promises",
    ),
    "missing layers": (
        lambda folder: changed_values(folder, num_hidden_layers=3),
        r"has no model.layers.2.input_layernorm.weight and 8 more",
    ),
    "missing biases": (
        lambda folder: changed_values(folder, attention_bias=True),
        r"has no model.layers.0.self_attn.q_proj.bias and 7 more",
    ),
    "an extra tensor": (
        lambda folder: changed_tensors(folder, lambda tensors: tensors.update({BIAS: np.zeros(32, np.float32)})),
        rf"has {BIAS} \[32\], which LlamaForCausalLM does not have with this config.json",
    ),
    "a layer too many": (
        lambda folder: changed_values(folder, num_hidden_layers=1),
        r"has model.layers.1.input_layernorm.weight \[16\], which LlamaForCausalLM does not have",
    ),
    "a transposed tensor": (
        lambda folder: changed_tensors(folder, lambda t: t.update({UP: np.ascontiguousarray(t[UP].T)})),
        rf"has {UP} \[16, 24\], and by config.json it must be \[24, 16\]",
    ),
    "another width": (
        lambda folder: changed_values(folder, intermediate_size=32),
        r"has model.layers.0.mlp.gate_proj.weight \[24, 16\], and by config.json it must be \[32, 16\]",
    ),
    "an unembedding that is tied": (
        lambda folder: changed_values(folder, tie_word_embeddings=False),
        "has no lm_head.weight, which config.json promises",
    ),
    "whole numbers": (
        lambda folder: with_dtype(folder, "model.norm.weight", "I64"),
        "has model.norm.weight in I64: this program reads F32, F16, BF16",
    ),
    "bytes": (
        lambda folder: with_dtype(folder, UP, "U8"),
        f"has {UP} in U8: this program reads F32, F16, BF16",
    ),
    "8-bit floats of the other kind": (
        lambda folder: with_dtype(folder, UP, "F8_E5M2"),
        f"has {UP} in F8_E5M2: this program reads F32, F16, BF16",
    ),
    "FP8 that config.json does not name": (
        lambda folder: with_dtype(folder, UP, "F8_E4M3"),
        f"has {UP} in F8_E4M3, and its config.json has no quant_method=fp8",
    ),
    "FP8 without its scales": (
        lambda folder: (with_dtype(folder, UP, "F8_E4M3"), changed_values(folder, **FP8)),
        f"has {UP} quantised, but no {UP}_scale_inv",
    ),
    "FP8 with other scales": (
        lambda folder: (with_dtype(folder, UP, "F8_E4M3", (2, 1)), changed_values(folder, **FP8)),
        rf"has {UP}_scale_inv \[2, 1\], and by config.json it must be \[1, 1\]",
    ),
    "a vector in FP8": (
        lambda folder: (with_dtype(folder, "model.norm.weight", "F8_E4M3"), changed_values(folder, **FP8)),
        r"has model.norm.weight \[16\] in F8_E4M3: only matrices may be",
    ),
    "another family": (
        lambda folder: changed_values(folder, model_type="gpt_oss", architectures=["GptOssForCausalLM"]),
        "has no num_experts_per_tok: it must be a whole number",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_of_another_model_is_refused_before_any_value_is_read(kind, tmp_path, monkeypatch):
    folder = exported(tmp_path, Config(**SMALL, tied_embeddings=True))[1]
    change, message = REFUSED[kind]
    change(folder)
    monkeypatch.delattr(tensor_files.Folder, "read")
    with pytest.raises(ValueError, match=message) as error:
        weights.load(folder, Config(**SMALL | weights.settings(folder)), mesh_of())
    assert "\n" not in str(error.value) and folder in str(error.value)
    with pytest.raises(ValueError, match=message):
        weights.show(folder)
