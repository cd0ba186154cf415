"""Eight simulated devices for every test, the TPU7x compiler at hand, and none of the noise of a missing TPU."""

import dataclasses
import gc
import importlib.metadata
import os

import compiler_flags
from benchmarks import quick, trials

# Programs of tests run once, for milliseconds, and take most of the time to compile: on the CPU with no optimization.
# It leaves what the TPU7x compiler makes as it is. XLA_FLAGS="" pytest: as users have it.
UNOPTIMIZED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"  # one LLVM module, not 32: a fifth of the processor time less
)
if importlib.metadata.version("jaxlib").startswith("0.10."):  # takes twice as long with them; later ones lack the flag
    UNOPTIMIZED += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", UNOPTIMIZED)
EFFORT = "jax_exec_time_optimization_effort"  # with the lowest a step compiles for TPU7x in a third of the time
os.environ.setdefault(EFFORT.upper(), "-1")
compiler_flags.without_tpu()
trials.pass_on_no_ignored_signals()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
pytest.register_assert_rewrite("support")  # so that an assertion there shows its values, as in a test

gc.disable()  # while tests are collected: almost nothing of it is garbage


def pytest_collection_modifyitems(items):
    quick.mark(items)


def pytest_collection_finish():
    """Keeps what was imported and collected out of later garbage collections: a full one takes half of 0.6 s."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)  # by default a twentieth of the time goes into it
    gc.enable()


@pytest.fixture
def full_effort():
    """Programs are compiled for TPU7x as users have them, for tests of what is scheduled beside what."""
    effort = getattr(jax.config, EFFORT, None)
    if effort is None:  # later versions of JAX have no such setting, and compile with full effort
        yield
        return
    jax.config.update(EFFORT, 0.0)
    yield
    jax.config.update(EFFORT, effort)


@pytest.fixture
def few_tiles(monkeypatch):
    """Kernels of attention with few tiles in an iteration: with the default number they compile for most of a test."""
    import flash  # not at the top: most tests need neither
    import flash_backward

    few = dict(full_unroll=2, masked_unroll=2, ahead=1), dict(queries=256, keys=256, chunk=128)
    for kernel, sizes in zip((flash, flash_backward), few, strict=True):
        rule = kernel.default_blocks
        smaller = lambda *shape, rule=rule, sizes=sizes: dataclasses.replace(rule(*shape), **sizes)
        monkeypatch.setattr(kernel, "default_blocks", smaller)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder that the workers of a run of pytest share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture
def programs(shared_folder, few_tiles):
    """A folder of compiled steps, as aot.py caches them, which the workers of a run of pytest share."""
    return shared_folder / "programs"
