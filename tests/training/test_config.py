"""Configurations: what is read, and that every fault is one line naming the key."""

import jax
import jax.numpy as jnp
import pytest

from opsnn_jax.training import DynamicLossScale, NoLossScale, StaticLossScale
from opsnn_jax.training.config import OptimizerConfig
from opsnn_jax.training.config_file import ConfigError, load
from opsnn_jax.training.tasks import make_optimizer

TEXT = """
run: {name: mnist, epochs: 8}
data: {name: mnist, batch_size: 100}
model: {name: resnet}
optimization: {precision: mixed_fp16, loss_scale: {initial: 4096, growth_interval: 9}}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    return str(path)


def test_reads_sections_and_defaults(path):
    config = load(path)
    assert config.run.seed == 0
    assert config.model.widths == (16, 32, 64)
    assert config.optimization.policy.compute == "float16"
    assert config.optimization.build_loss_scale() == DynamicLossScale(
        initial=4096, growth_interval=9
    )


@pytest.mark.parametrize(
    "given, expected",
    [
        ("auto", DynamicLossScale()),
        ("none", NoLossScale()),
        ("1024", StaticLossScale(1024)),
        ("{hysteresis: 2, min: 0.5}", DynamicLossScale(hysteresis=2, min=0.5)),
    ],
)
def test_kinds_of_loss_scale(path, given, expected):
    config = load(path, [f"optimization.loss_scale={given}"])
    assert config.optimization.build_loss_scale() == expected


def test_automatic_loss_scale_follows_the_precision(path):
    config = load(path, ["optimization={precision: mixed_bf16}"])
    assert config.optimization.build_loss_scale() == NoLossScale()


def test_overrides_reach_into_sections_that_are_not_there(path):
    config = load(path, ["run.seed=3", "optimizer.learning_rate=1e-3", "data.shift=0"])
    assert (config.run.seed, config.data.shift) == (3, 0)
    assert config.optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(
    "override, says",
    [
        ("run.sed=1", "run.sed: unknown key. Did you mean 'seed'? Allowed: name, seed"),
        ("optimzer.name=sgd", "optimzer: unknown key. Did you mean 'optimizer'?"),
        ("optimization.precison=x", "Did you mean 'precision'? Allowed: precision"),
        ("optimization.precision=fp8", "optimization.precision: Policy: expected"),
        ("optimization.loss_scale.inital=8", "inital: unknown key. Did you mean 'init"),
        ("optimization.loss_scale.initial=3", "initial must be a power of two"),
        ("optimization.loss_scale.initial=a", "initial: must be a valid number"),
        ("optimization.loss_scale=3", "value must be a power of two"),
        ("optimization.loss_scale=lots", "expected 'auto', 'none', a number, or keys"),
        ("optimization.loss_scale=true", "expected 'auto', 'none', a number, or keys"),
        ("optimization.micro_batches=3", "(3) must divide data.batch_size (100)"),
        ("data.batch_size=ten", "data.batch_size: must be a valid integer"),
        ("data.batch_size=-1", "data.batch_size: must be greater than 0; got -1."),
        (
            "data.name=cifar",
            "data.name: expected 'mnist', 'python_manual'; got 'cifar'",
        ),
        ("data={batch_size: 3}", "data.name: is missing"),
        ("data=3", "data: must be a section with keys; got 3."),
        ("model.heads=3", "model.heads: unknown key. Allowed: name, widths, blocks."),
        ("model.name=gpt", "data 'mnist' goes with model 'resnet', not 'gpt'"),
        ("model.widths=[1,a]", "model.widths.1: must be a valid integer"),
        ("model={name: gpt, width: 9, heads: 2}", "heads (2) must divide width (9)"),
        (
            "optimizer.name=adam",
            "optimizer.name: must be 'adamw' or 'sgd'; got 'adam'.",
        ),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate: must be a finite"),
        ("run.steps=3", "run: give one of epochs and steps."),
        ("run.name=a/b", "run.name: must match pattern"),
        ("run=3", "run: must be a section with keys; got 3."),
        ("run.seed.a=3", "--set run.seed.a=3: seed is not a section."),
        ("run.seed", "--set run.seed: expected key=value"),
        ("run.seed=[1", "--set run.seed=[1: is not YAML"),
        ("run.seed=2024-13-01", "is not YAML: month must be in 1..12"),
        ("run={seed: 1, seed: 2}", "the key 'seed' is given twice"),
        ("run.epochs=true", "run.epochs: must be a number; got True."),
        ("optimizer.learning_rate=-1e-3", "learning_rate: must be greater than 0"),
        ("optimization.loss_scale=1e4", "value must be a power of two"),
        ("optimization.loss_scale={growth_interval: 3000000000}", "2**31 - 1"),
        ("optimization.precision=compute=float64", "JAX_ENABLE_X64=1"),
        ("model.widths=3", "model.widths: must be a list; got 3."),
        ("model.widths=[]", "model.widths: must have at least 1 item, not 0"),
    ],
)
def test_fault_is_one_line_naming_the_key(path, override, says):
    first = ["run.seed=1"]  # `run.seed.a` needs it there
    with pytest.raises(ConfigError) as e:
        load(path, [*first, override])
    assert says in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "content, says",
    [
        ("a: [1", "is not YAML"),
        ("", "expected sections run, data, model, optimizer, optimization"),
        ("run: {name: a}\nrun: {name: b}", "the key 'run' is given twice"),
        ("run: {name: 2024-13-01}", "is not YAML: month must be in"),
        ("\0", "is not YAML: unacceptable character"),
        ("- 1", "expected sections"),
        ("{1: 2, run: {name: a}}", "keys must be words"),
        ("run: {name: a, epochs: 1}", "data: is missing"),
    ],
)
def test_fault_of_the_file(tmp_path, content, says):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        load(str(path))


def test_folder_for_a_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(str(tmp_path))


def test_missing_file():
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read: No such file"):
        load("nowhere.yaml")


@pytest.mark.parametrize("name", ["mnist", "text"])
def test_examples_are_valid(name, request):
    load(str(request.config.rootpath / "examples" / f"{name}.yaml"))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warmup, steps", [(0, 1), (0, 2), (1, 1), (3, 3), (9, 4)])
def test_rates_are_finite_however_short_the_run(schedule, warmup, steps):
    # optax#1403: an interval of length zero gave a rate of NaN.
    config = OptimizerConfig(
        name="sgd",
        learning_rate=0.5,
        schedule=schedule,
        warmup_steps=warmup,
        momentum=0.0,
    )
    with jax.numpy_dtype_promotion("standard"), jax.disable_jit():
        optimizer = make_optimizer(config, steps)
        state = optimizer.init({"w": jnp.ones(())})
        for i in range(steps + 2):
            updates, state = optimizer.update(
                {"w": jnp.ones(())}, state, {"w": jnp.zeros(())}
            )
            rate = -float(updates["w"])
            assert 0.0 <= rate <= 0.5
            assert rate > 0.0 or i > 0  # the first update is not lost
