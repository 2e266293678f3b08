"""largest_batch: the search with a compiler of our own, and with the true ones."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from absent import both, compiles, report, shape
from ladders import SHORT

import mpjax
from mpjax._src.tools.hardware import batch_size, ladder
from mpjax._src.tools.hardware.ladder import Setting
from mpjax._src.tools.hardware.targets import GIB, find_target

H100 = find_target("h100")


def of_size(total):
    """A report of a program that takes so many bytes."""
    found = report("h100")
    other = found.total_bytes - found.temp_bytes
    return dataclasses.replace(found, temp_bytes=total - other)


def search(fits_to, *, limit=2**20, multiple_of=1, refuse_from=None, sizes=lambda n: n):
    """Searches where a batch takes ``sizes`` in MiB, and ``fits_to`` MiB are there."""
    compiled = []

    def compile_batch(setting, batch, what):
        compiled.append(batch)
        assert what == f"a batch of {batch}"
        if refuse_from and batch >= refuse_from:
            return None
        return of_size(int(sizes(batch) * 2**20))

    room = 0.25, fits_to * 2**20
    looked = batch_size.Search(H100, *room, multiple_of, limit, compile_batch, lambda n: n)
    plain = Setting("", mpjax.get_policy("float32"))
    found = looked.result(looked.found(plain), plain)
    assert [t.batch for t in found.tries] == compiled and len(set(compiled)) == len(compiled)
    return found


@pytest.mark.parametrize("largest", [1, 2, 3, 4, 7, 100, 1000, 4095, 4096, 4097])
@pytest.mark.parametrize("refuses", [False, True])
def test_largest_batch_finds_the_largest_that_fits(largest, refuses):
    found = search(largest, refuse_from=largest + 1 if refuses else None)
    assert found.batch == largest and not found.limited
    assert found.report.total_bytes == largest * 2**20
    unknown = refuses and not found.predicted
    assert found.next_bytes == (None if unknown else (largest + 1) * 2**20)
    assert len(found.tries) <= 5


def test_largest_batch_compiles_three_programs_of_a_linear_model_and_says_so():
    found = search(10**4, sizes=lambda n: 500 + 20 * n)
    assert found.batch == 475 and len(found.tries) == 3 and found.linear and found.predicted
    text = " ".join(str(found).split())
    assert "Memory is linear in the batch: 3 programs were compiled" in text
    assert "The next size was not compiled: it is predicted to take 9.79 GiB" in text


def test_largest_batch_compiles_the_next_size_of_a_model_with_attention_over_it():
    found = search(10**4, sizes=lambda n: 500 + n + n * n)
    assert found.batch == 96 and not found.predicted and 97 in [t.batch for t in found.tries]
    assert found.next_bytes == (500 + 97 + 97**2) * 2**20 and not found.linear
    text = " ".join(str(found).split())
    assert f"Memory is not linear in the batch: {len(found.tries)} programs" in text
    assert "predicted" not in text


def test_largest_batch_is_a_multiple_of_multiple_of():
    found = search(100, multiple_of=8)
    assert found.batch == 96 and found.next_bytes == 104 * 2**20
    assert all(t.batch % 8 == 0 for t in found.tries)


def test_largest_batch_ends_at_its_limit_and_says_so():
    found = search(2**30, limit=1000)
    assert found.batch == 1000 and found.limited and found.next_bytes is None
    assert "ended at limit=1000. Larger batches may fit" in str(found)
    assert search(2**30, limit=1).tries[0].batch == 1


def test_largest_batch_raises_out_of_memory_if_none_fits():
    with pytest.raises(
        mpjax.errors.OutOfMemoryError, match="a batch of 1 does not fit target='h100': it needs 1"
    ):
        search(0)
    with pytest.raises(mpjax.errors.OutOfMemoryError, match="batch of 4.*more memory than it has"):
        search(100, refuse_from=1, multiple_of=4)


def test_largest_batch_result_is_data_and_a_table():
    found = search(5)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["batch"] == 5 and plain["report"]["target"] == "h100"
    assert plain["tries"][0] == {**plain["tries"][0], "batch": 1, "fits": True}
    text = str(found)
    assert "h100: the largest batch is 5, with 5.00 MiB of 5.00 MiB (25% of 79.11 GiB" in text
    assert "does not fit" in text and text.count("  fits") == 2


def args(batch):
    return (shape(batch, 4),)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"make_args": 3}, TypeError, "make_args=3 must be a function"),
        ({"fun": None}, TypeError, "fun=None must be a function"),
        ({"make_args": lambda n: shape(n)}, TypeError, r"make_args\(1\) returned a ShapeDtype.*tu"),
        ({"make_args": lambda n: (shape(3),)}, ValueError, "the same shapes for batches of 1 and"),
        ({"multiple_of": 0}, ValueError, "multiple_of=0 must be an integer"),
        ({"limit": 2.5}, ValueError, "limit=2.5 must be an integer"),
        ({"limit": 7, "multiple_of": 8}, ValueError, "limit=7 must be at least multiple_of=8"),
        ({"reserve": 1.0}, ValueError, "reserve=1.0 must be a share.*0.25 on GPUs"),
        ({"reserve": "no"}, ValueError, "reserve='no' must be a share"),
        ({"timeout": 0}, ValueError, "timeout=0 must be a number of seconds"),
        ({"target": "h1000"}, ValueError, "Unknown target='h1000'"),
        ({"storage": "all"}, ValueError, "storage='all' must be 'any'"),
        (
            {"storage": "any", "policy": "bfloat16"},
            ValueError,
            "policy='bfloat16' casts .*casting=op",
        ),
    ],
)
def test_largest_batch_refuses_bad_arguments(change, error, match):
    call = {"target": "h100", "make_args": args, "fun": jnp.sin, **change}
    with pytest.raises(error, match=match):
        mpjax.hardware.largest_batch(**call)


# ---- with any setting --------------------------------------------------------------------------


class Sizes:
    """Steps of given bytes: one for all, and one for each of the batch."""

    def __init__(self, figures):
        self.figures, self.compiled_for = figures, []

    def compiled(self, setting, batch, what):
        assert what == f"a batch of {batch}, {setting.name}"
        self.compiled_for.append((setting.name, batch))
        fixed, each = self.figures[setting.name]
        return of_size((fixed + each * batch) * 2**20)


def any_setting(figures, available, limit=2**20):
    rungs = [Setting(name, mpjax.get_policy(f"O2:bfloat16,{name}")) for name in figures]
    steps = Sizes(figures)
    room = 0.25, available * 2**20
    looked = batch_size.Search(H100, *room, 1, limit, steps.compiled, lambda batch: batch)
    found = looked.of_any(rungs)
    assert len({*steps.compiled_for}) == len(steps.compiled_for)
    return found, steps


FAST, LEAN, EIGHT = "storage=fast", "storage=lean", "fused_attention=true"


def test_largest_batch_of_any_setting_is_that_of_the_smallest():
    found, steps = any_setting({FAST: (1, 8), LEAN: (2, 4), EIGHT: (8, 2)}, 50)
    assert found.batch == 21 and found.next_bytes == 52 * 2**20 and not found.predicted
    assert found.policy == "O2:bfloat16,fused_attention=true"
    assert {t.setting for t in found.tries} == {EIGHT} and len(found.tries) == 3
    # Of the next batch, all settings; of this one, those from the fastest on.
    assert len(steps.compiled_for) <= 3 + 3 + 3


def test_largest_batch_of_any_setting_finds_the_smallest_where_one_does_not_fit():
    """The ladder's last setting is not the smallest one."""
    found, _ = any_setting({FAST: (1, 8), LEAN: (2, 2), EIGHT: (8, 4)}, 50)
    assert found.batch == 24 and found.policy == "O2:bfloat16,storage=lean"
    assert found.report.total_bytes == 50 * 2**20
    assert [t.setting for t in found.tries] == [EIGHT] * 3 + [LEAN] * 3
    # Not even of the smallest batch.
    found, _ = any_setting({FAST: (99, 8), LEAN: (2, 2), EIGHT: (88, 4)}, 50)
    assert found.batch == 24 and found.policy == "O2:bfloat16,storage=lean"
    with pytest.raises(mpjax.errors.OutOfMemoryError, match="a batch of 1 does not fit"):
        any_setting({FAST: (99, 8), LEAN: (77, 2), EIGHT: (88, 4)}, 50)


def test_largest_batch_of_any_setting_compares_none_where_all_batches_fit():
    found, steps = any_setting({FAST: (1, 8), LEAN: (2, 2), EIGHT: (8, 4)}, 500, limit=16)
    assert found.batch == 16 and found.limited and found.policy == "O2:bfloat16"
    assert {(name, batch) for name, batch in steps.compiled_for if name != EIGHT} == {
        (FAST, 16),
        (LEAN, 16),
    }


def test_largest_batch_of_any_setting_names_the_fastest_that_fits_it():
    found, _ = any_setting({FAST: (3, 2), LEAN: (2, 2), EIGHT: (2, 2)}, 51)
    assert found.batch == 24 and found.policy == "O2:bfloat16"
    assert "policy  O2:bfloat16" in str(found) and "setting" in str(found)


# ---- with the compilers --------------------------------------------------------------------------


@pytest.mark.parametrize("target", both("v100", "h100", "v5e"))
def test_largest_batch_agrees_with_arithmetic(target):
    """A program of one array in and one out, of 256 MiB for each of the batch."""
    found = mpjax.hardware.largest_batch(target, lambda n: (shape(n, 2**26),), jnp.sin)
    reserve = 0.05 if target == "v5e" else 0.25
    assert found.reserve == reserve
    expected = int(find_target(target).memory * (1 - reserve) / (GIB / 2))
    # A TPU's program takes a little itself, and its batches are padded.
    assert expected - (target == "v5e") * 8 <= found.batch <= expected
    assert found.report.fits and found.report.total_bytes <= found.available_bytes
    assert len(found.tries) <= (9 if target == "v5e" else 3)


def attention_step(batch, length=256):
    """A step of a layer with attention, and its arguments."""

    def loss(params, x):
        q, k, v = jnp.split(x @ params["qkv"], 3, -1)
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        x = x + jnp.einsum("bqk,bkd->bqd", weights, v)
        return jnp.mean((x + jax.nn.gelu(x @ params["up"]) @ params["up"].T) ** 2)

    init, step = mpjax.build_train_step(loss, optax.adam(1e-3), "mixed_bfloat16")
    state = jax.eval_shape(init, {"qkv": shape(256, 768), "up": shape(256, 1024)})
    return jax.jit(step, donate_argnums=0), (state, shape(batch, length, 256))


@compiles("h100")
def test_largest_batch_of_a_training_step_knows_what_the_compiler_says_of_the_next_size():
    step, _ = attention_step(1)
    found = mpjax.hardware.largest_batch("h100", lambda n: attention_step(n)[1], step, reserve=0.95)
    following = mpjax.compile_for("h100", step, *attention_step(found.batch + 1)[1]).total_bytes
    assert found.report.total_bytes <= found.available_bytes < following
    # The program of a single example is another one, so the next size is compiled too.
    assert found.linear and len(found.tries) <= 5
    assert abs(following - found.next_bytes) < 1e-3 * following


@pytest.mark.thorough
@compiles("h100")
def test_largest_length_of_attention_is_not_linear_and_compiled_on_both_sides():
    step, _ = attention_step(1)
    make_args = lambda n: attention_step(8, n)[1]  # noqa: E731
    found = mpjax.hardware.largest_batch("h100", make_args, step, multiple_of=128, reserve=0.95)
    assert not found.linear and not found.predicted
    tried = {t.batch: t.fits for t in found.tries}
    assert tried[found.batch] and not tried[found.batch + 128] and len(tried) <= 10


@pytest.mark.thorough
@compiles("v100")
def test_largest_batch_of_any_setting_is_that_of_the_best_one(monkeypatch):
    monkeypatch.setattr(ladder, "LADDER", SHORT)

    def loss(w, x):
        for _ in range(4):
            x = x + jax.nn.gelu(x @ w) @ w.T
        return jnp.mean(x**2)

    def make_step(policy):
        return jax.grad(mpjax.autocast(loss, policy))

    def make_args(batch):
        return shape(512, 2048), shape(batch, 512)

    call = functools.partial(mpjax.hardware.largest_batch, "v100", make_args, multiple_of=2**15)
    policies = "mixed_float16", "mixed_float16,storage=lean"
    each = {policy: call(make_step(policy)).batch for policy in policies}
    found = call(make_step, storage="any", policy="mixed_float16")
    assert found.batch == max(each.values()) > min(each.values())
    assert each[found.policy] == found.batch


@compiles("v5e")
def test_largest_batch_counts_what_a_tpu_compiler_refuses_as_too_large():
    found = mpjax.hardware.largest_batch("v5e", lambda n: (shape(n, 2**27),), jnp.sin, reserve=0.0)
    refused = [t.batch for t in found.tries if t.total_bytes is None]
    assert refused and min(refused) > found.batch and found.next_bytes is None


@compiles("v100")
def test_largest_batch_raises_other_errors_of_the_compiler():
    def attend(q):
        return jax.nn.dot_product_attention(q, q, q)

    def make_args(batch):
        return (shape(batch, 128, 4, 64, dtype=jnp.bfloat16),)

    with pytest.raises(mpjax.errors.CompileError, match="Unsupported algorithm"):
        mpjax.hardware.largest_batch("v100", make_args, attend)
