"""The memory of a compiled program by kind, for real programs compiled for the CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent import report

import mpjax
from mpjax._src.tools.hardware.hlo import parse, scope_of
from mpjax._src.tools.hardware.lifetimes import most_at_once
from mpjax._src.tools.hardware.memory import Sizes, by_kind, memory_rows

WIDTH, BATCH, LAYERS = 64, 512, 3
BYTES = 4


def loss(params, batch):
    x = batch
    for i in range(LAYERS):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ params[f"w{i}"])
    return jnp.mean(x**2)


PARAMS = {f"w{i}": jnp.full((WIDTH, WIDTH), 0.1) for i in range(LAYERS)}
X = jnp.linspace(-1.0, 1.0, BATCH * WIDTH).reshape(BATCH, WIDTH)
OF_PARAMS = LAYERS * WIDTH * WIDTH * BYTES


def compiled(fun, *args, donate=0):
    """Returns the rows of a program, and what the compiler says that it takes."""
    done = jax.jit(fun, donate_argnums=donate).lower(*args).compile()
    stats, text = done.memory_analysis(), done.as_text()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    sizes = Sizes(stats.argument_size_in_bytes, results, stats.temp_size_in_bytes, 0)
    rows = memory_rows(text, sizes)
    assert sum(row.bytes for row in rows) == sum((sizes.arguments, results, sizes.temporary))
    assert all(row.bytes > 0 for row in rows)
    return rows, sizes, text


def trained(policy="float32", optimizer=None, **options):
    init, step = mpjax.build_train_step(loss, optimizer or optax.adam(1e-3), policy, **options)
    return compiled(step, init(jax.tree.map(jnp.copy, PARAMS)), X)


def test_memory_rows_of_a_training_step_have_each_kind():
    rows, _, _ = trained()
    found = by_kind(rows)
    assert found["parameters"] == OF_PARAMS and found["moments"] == 2 * OF_PARAMS
    assert "masters" not in found
    assert X.nbytes <= found["other arguments"] <= X.nbytes + 100  # and counters
    # Of each layer but the last tanh's value is what its derivative and the next matmul read.
    one = BATCH * WIDTH * BYTES
    assert (LAYERS - 1) * one <= found["kept activations"] <= (LAYERS + 1) * one
    scopes = {row.name for row in rows if row.kind == "kept activations"}
    assert {f"layer_{i}" for i in range(LAYERS - 1)} <= scopes


def test_memory_rows_tell_codes_from_other_kept_activations():
    """By hand, in XLA's form: XLA:CPU computes codes again in the backward pass."""
    forward, backward = "jvp(layer)", "transpose(jvp(layer))"
    lines = [
        ("%x", "f32[64]{0} parameter(0)", ""),
        ("%codes", "s8[64]{0} tanh(%x)", forward),
        ("%scales", "u8[4]{0} slice(%codes)", forward),
        ("%half", "bf16[64]{0} tanh(%x)", forward),
        ("%mask", "pred[64]{0} compare(%x, %x)", forward),
        ("%wide", "f32[64]{0} multiply(%codes, %scales)", backward),
        ("ROOT %out", "f32[8]{0} slice(%mask, %wide, %half)", backward),
    ]
    ops = (f'  {name} = {op}, metadata={{op_name="jit(f)/{at}/op"}}' for name, op, at in lines)
    entry = "\n".join(("ENTRY %main (x: f32[64]) -> f32[8] {", *ops, "}"))
    sizes = Sizes(64 * BYTES, 0, 2**10, 0)
    found = by_kind(memory_rows(f"HloModule f, is_scheduled=true\n\n{entry}\n", sizes))
    assert found["kept 8-bit codes"] == 64 + 4
    assert found["kept activations"] == 64 * (2 + 1)


@pytest.mark.parametrize("policy", ["params=bfloat16,compute=bfloat16,output=float32"])
def test_memory_rows_tell_masters_from_parameters(policy):
    rows, _, _ = trained(policy)
    found = by_kind(rows)
    assert found["parameters"] == OF_PARAMS / 2 and found["masters"] == OF_PARAMS
    assert found["moments"] == 2 * OF_PARAMS


def test_memory_rows_find_parameters_of_a_plain_optax_step():
    """No class of ours, no argument called params: moments say what is a parameter."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(carry, data):
        weights, opt = carry
        value, slopes = jax.value_and_grad(loss)(weights, data)
        updates, opt = optimizer.update(slopes, opt, weights)
        return (optax.apply_updates(weights, updates), opt), value

    found = by_kind(compiled(step, (PARAMS, optimizer.init(PARAMS)), X)[0])
    assert found["parameters"] == OF_PARAMS == found["moments"]
    assert found["other arguments"] == X.nbytes


def test_memory_rows_do_not_guess_which_arguments_are_parameters():
    """Two arguments of one shape and path: which of them the moments are of is not known."""
    optimizer = optax.adam(1e-3)

    def step(a, b, opt):
        updates, opt = optimizer.update(jax.tree.map(jnp.add, a, b), opt)
        return optax.apply_updates(a, updates), opt

    found = by_kind(compiled(step, PARAMS, PARAMS, optimizer.init(PARAMS), donate=())[0])
    assert "parameters" not in found and found["moments"] == 2 * OF_PARAMS
    assert found["other arguments"] >= 2 * OF_PARAMS


def test_memory_rows_find_gradients_among_results_and_arguments():
    rows, *_ = compiled(jax.grad(loss), PARAMS, X, donate=())
    found = by_kind(rows)
    assert found["parameters"] == OF_PARAMS == found["gradients"]
    optimizer = optax.adam(1e-3)

    def apply(grads, opt, weights):
        updates, opt = optimizer.update(grads, opt, weights)
        return optax.apply_updates(weights, updates), opt

    found = by_kind(compiled(apply, PARAMS, optimizer.init(PARAMS), PARAMS, donate=(1, 2))[0])
    assert found["gradients"] == OF_PARAMS == found["parameters"]


def test_memory_rows_tell_gradients_that_wait_for_the_optimizer():
    """A norm over all of them, as clipping takes it, keeps each until the last is there."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))

    def step(weights, data):
        slopes = jax.grad(loss)(weights, data)
        return optax.apply_updates(weights, optimizer.update(slopes, optimizer.init(weights))[0])

    found = by_kind(compiled(step, PARAMS, X[:4])[0])
    assert found["gradients"] >= (LAYERS - 1) * WIDTH * WIDTH * BYTES
    assert found["parameters"] == OF_PARAMS


def test_memory_rows_of_a_scan_name_its_kept_stack():
    stack = jnp.stack([*PARAMS.values()])

    def scanned(params, batch):
        def layer(x, w):
            with jax.named_scope("layer"):
                return jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

    rows, *_ = compiled(jax.grad(scanned), stack, X, donate=())
    assert by_kind(rows)["gradients"] == OF_PARAMS  # the result, which the loop fills
    kept = [row for row in rows if row.kind == "kept activations"]
    assert sum(row.bytes for row in kept) >= LAYERS * BATCH * WIDTH * BYTES
    assert any("layer" in row.name for row in kept)


@pytest.mark.parametrize("sharpness", ["whole", "remat"])
def test_most_at_once_agrees_with_what_the_compiler_allots(sharpness):
    """The schedule, read again, gives the compiler's own figure to a tenth."""
    fun = jax.checkpoint(loss) if sharpness == "remat" else loss
    _, sizes, text = compiled(jax.grad(fun), PARAMS, X, donate=())
    module = parse(text)
    assert module.scheduled
    alive = sum(buffer.bytes for buffer in most_at_once(module.entry))
    np.testing.assert_allclose(alive, sizes.temporary, rtol=0.1)


def test_memory_rows_of_a_forward_pass_keep_no_activations():
    found = by_kind(compiled(loss, PARAMS, X, donate=())[0])
    assert "kept activations" not in found and "gradients" not in found


def test_memory_rows_without_a_schedule_are_temporary_not_known():
    _, sizes, text = compiled(jax.grad(loss), PARAMS, X, donate=())
    blind = memory_rows(text.replace("is_scheduled=true", "x=1", 1), sizes)
    assert by_kind(blind)["temporary, not known"] == sizes.temporary
    tight = memory_rows(text, dataclasses.replace(sizes, temporary=8, results=0))
    assert by_kind(tight)["temporary, not known"] == 8


def test_memory_of_results_serves_temporary_arrays_before_they_are_there():
    """Without donation new parameters have memory of their own, which temporary arrays may take."""
    init, step = mpjax.build_train_step(loss, optax.adam(1e-3), "mixed_bfloat16")
    batch = X[:8]  # less is kept than there are results
    rows, sizes, _ = compiled(step, init(PARAMS), batch, donate=())
    found = by_kind(rows)
    assert "temporary, not known" not in found and found["parameters"] == OF_PARAMS
    assert found.get("results", 0) <= sizes.results


@pytest.mark.parametrize("target", ["v100", "h100", "v5e"])
def test_memory_rows_of_stored_programs_sum_to_the_total(target):
    found = report(target)
    rows = found.memory()
    assert sum(row.bytes for row in rows) == found.total_bytes
    html = found.to_html()
    assert "Memory by kind" in html and f"Compiled for {target}" in html


def test_scope_of_reads_scopes_off_names():
    for name, scope in (
        ("jit(step)/jvp(Net)/Dense_0/dot_general", "Net/Dense_0"),
        ("jit(step)/transpose(jvp(Net))/Dense_0/dot_general", "Net/Dense_0"),
        ("jit(f)/jvp(mpjax.autocast)/while/body/closed_call/layer/tanh", "layer"),
        ("jit(f)/add", ""),
        ("", ""),
    ):
        assert scope_of(name) == scope
