"""Weights for inference: from the masters, never made infinite, readable elsewhere."""

import functools
import json
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import bits, linear_loss, linear_problem
from support import thorough_but

import mpjax

stored = pytest.importorskip("safetensors.numpy")


@functools.cache
def trained(policy):
    params, batch = linear_problem(np.random.default_rng(0))
    init, step = mpjax.build_train_step(linear_loss, optax.adam(1e-2), policy)
    return jax.jit(lambda params: step(init(params), batch)[0])(params)


POLICIES = ["float32", "mixed_float16", "O2:float16", "O3:bf16"]


@pytest.mark.parametrize("policy", thorough_but(POLICIES, "O2:float16", "O3:bf16"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "half", "f16"])
def test_export_params_come_from_the_masters(policy, dtype):
    state = trained(policy)
    got = mpjax.checkpoint.export_params(state, dtype)
    full = mpjax.optim.master_params(state.opt_state, state.params)
    assert bits(got) == bits(mpjax.cast(full, dtype))
    parts = {"params": state.params, "opt_state": state.opt_state}
    assert bits(mpjax.checkpoint.export_params(parts, dtype)) == bits(got)


def test_export_params_in_16_bits_refuse_to_overflow():
    params = {f"layer_{i}": jnp.full(2, 7e4 if i else 6e4) for i in range(7)}
    state = {"params": {**params, "bad": jnp.array([jnp.inf, 1.0]), "n": jnp.int32(10**6)}}
    with pytest.raises(ValueError, match=r"infinite in layer_1, .*layer_5 and 1 more"):
        mpjax.checkpoint.export_params(state, "float16")
    half = mpjax.checkpoint.export_params(state, "bfloat16")
    assert half["bad"][0] == jnp.inf and half["n"].dtype == jnp.int32
    with pytest.raises(ValueError, match="dtype='int8' is not a floating dtype"):
        mpjax.checkpoint.export_params(state, "int8")
    with pytest.raises(TypeError, match="state is a dict without params"):
        mpjax.checkpoint.export_params({"w": jnp.ones(2)})


PARAMS = {
    "Dense_0": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3, jnp.bfloat16)},
    "list": [jnp.float16(2.5), jnp.zeros((0, 2)), jnp.arange(3), jnp.array(True)],
}


def test_safetensors_file_holds_a_tree_bit_for_bit(tmp_path):
    mpjax.checkpoint.save_safetensors(tmp_path / "p", PARAMS, {"made by": "a test"})
    back = mpjax.checkpoint.load_safetensors(tmp_path / "p", like=PARAMS)
    assert jax.tree.structure(back) == jax.tree.structure(PARAMS) and bits(back) == bits(PARAMS)
    assert [x.dtype for x in jax.tree.leaves(back)] == [x.dtype for x in jax.tree.leaves(PARAMS)]
    flat = mpjax.checkpoint.load_safetensors(tmp_path / "p")
    assert {*flat} == {"Dense_0.kernel", "Dense_0.bias", *(f"list.{i}" for i in range(4))}
    shapes = jax.eval_shape(lambda: PARAMS)
    assert bits(mpjax.checkpoint.load_safetensors(tmp_path / "p", like=shapes)) == bits(PARAMS)


def test_safetensors_file_has_the_documented_format(tmp_path):
    """By hand: a length, a header of JSON, and rows of bytes in C order."""
    transposed = jnp.arange(6.0).reshape(2, 3).T
    weights = {"a": transposed, "b": np.asfortranarray(np.arange(6.0, dtype=np.float32)[None])}
    mpjax.checkpoint.save_safetensors(tmp_path / "p", weights)
    data = (tmp_path / "p").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    start, end = header["a"]["data_offsets"]
    assert header["a"]["dtype"] == "F32" and header["a"]["shape"] == [3, 2]
    assert data[8 + length + start : 8 + length + end] == np.asarray(transposed).tobytes()
    order = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    mpjax.checkpoint.save_safetensors(tmp_path / "p", {"a": order})
    assert (stored.load_file(tmp_path / "p")["a"] == order).all()


def test_load_safetensors_refuses_a_file_that_does_not_fit_like(tmp_path):
    mpjax.checkpoint.save_safetensors(tmp_path / "p", {"a": {"w": jnp.ones(2)}, "b": jnp.ones(3)})
    load = lambda like, **kw: mpjax.checkpoint.load_safetensors(tmp_path / "p", like, **kw)  # noqa: E731
    good = {"a": {"w": jnp.ones(2)}, "b": jnp.ones(3)}
    with pytest.raises(ValueError, match="like lacks 'b'"):
        load({"a": good["a"]})
    with pytest.raises(ValueError, match="lacks 'c'.*Names are paths joined"):
        load({**good, "c": jnp.ones(1)})
    with pytest.raises(ValueError, match=r"params/b has shape \(3,\).*but \(4,\) in like"):
        load({**good, "b": jnp.ones(4)})
    half = mpjax.cast(good, "bfloat16")
    with pytest.raises(ValueError, match="narrow params/a/w from float32 to bfloat16"):
        load(half)
    assert bits(load(half, allow_narrowing=True)) == bits(half)


def test_load_safetensors_does_not_narrow_float64_in_silence(tmp_path):
    mpjax.checkpoint.save_safetensors(tmp_path / "p", {"w": np.full(2, 0.1)})
    assert mpjax.checkpoint.load_safetensors(tmp_path / "p")["w"].dtype == np.float64
    with pytest.raises(ValueError, match="narrow params/w from float64 to float32"):
        mpjax.checkpoint.load_safetensors(tmp_path / "p", {"w": jnp.ones(2)})
    mpjax.checkpoint.save_safetensors(tmp_path / "q", {"w": np.full(2, 1e300)})
    with pytest.raises(ValueError, match="become infinite in params/w"):
        mpjax.checkpoint.load_safetensors(tmp_path / "q", {"w": jnp.ones(2)}, allow_narrowing=True)
    back = mpjax.checkpoint.load_safetensors(
        tmp_path / "p", {"w": jnp.ones(2)}, allow_narrowing=True
    )
    assert isinstance(back["w"], jax.Array) and back["w"][0] == np.float32(0.1)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, "two leaves would have the name 'a.b'"),
        ({"a": jnp.ones(1, jnp.float8_e4m3fn)}, "'a' is float8_e4m3fn"),
    ],
)
def test_save_safetensors_refuses_what_others_cannot_read(params, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        mpjax.checkpoint.save_safetensors(tmp_path / "p", params)
    assert not any(tmp_path.iterdir())


def test_load_safetensors_names_damaged_files(tmp_path):
    mpjax.checkpoint.save_safetensors(tmp_path / "p", PARAMS)
    data = (tmp_path / "p").read_bytes()
    for wrong in (b"", data[:5], data[: len(data) // 2], data[:-1], b"\xff" * 40):
        (tmp_path / "p").write_bytes(wrong)
        with pytest.raises(mpjax.checkpoint.CheckpointError, match="/p' is not a complete"):
            mpjax.checkpoint.load_safetensors(tmp_path / "p")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        mpjax.checkpoint.load_safetensors(tmp_path / "q")


NO_ARRAYS = [object(), len, "text", b"x", jax.random.key(0), 10**30, np.ma.ones(2), 1e300]


@pytest.mark.parametrize("leaf", NO_ARRAYS, ids=lambda leaf: type(leaf).__name__)
def test_save_safetensors_names_a_leaf_that_is_no_array(leaf, tmp_path):
    with pytest.raises(mpjax.checkpoint.CheckpointError, match=r"(?s): 'a\.b\.0' is .*contain"):
        mpjax.checkpoint.save_safetensors(tmp_path / "p", {"a": {"b": [leaf]}, "w": jnp.ones(1)})
    assert not any(tmp_path.iterdir())


def test_save_safetensors_names_a_leaf_without_values(tmp_path, monkeypatch):
    gone = jnp.ones(2)
    gone.delete()
    for leaf, why in ((gone, "deleted"), (jax.ShapeDtypeStruct((), jnp.int32), "only a shape")):
        with pytest.raises(mpjax.checkpoint.CheckpointError, match=f"params: 'w' .*{why}"):
            mpjax.checkpoint.save_safetensors(tmp_path / "p", {"w": leaf})
    monkeypatch.setattr(type(gone), "is_fully_addressable", False)
    with pytest.raises(mpjax.checkpoint.CheckpointError, match="'w' is spread over several proc"):
        mpjax.checkpoint.save_safetensors(tmp_path / "p", {"w": jnp.ones(2)})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("params", [{}, None, {"a": None}], ids=str)
def test_save_safetensors_refuses_to_write_nothing(params, tmp_path):
    with pytest.raises(mpjax.checkpoint.CheckpointError, match="params=.* contains no arrays"):
        mpjax.checkpoint.save_safetensors(tmp_path / "p", params)
    assert not any(tmp_path.iterdir())


def test_save_safetensors_writes_only_what_can_be_read(tmp_path):
    """The header has a name of its own in the place of an array's."""
    (tmp_path / "folder").mkdir()
    wrong = [
        ("p", {"__metadata__": jnp.ones(1)}),
        ("folder", PARAMS),
        ("p", {"\udc80": jnp.ones(1)}),
    ]
    for name, params in wrong:
        with pytest.raises(mpjax.checkpoint.CheckpointError, match=f"{name}' could not be written"):
            mpjax.checkpoint.save_safetensors(tmp_path / name, params)
    for metadata in ({"step": 1}, {1: "x"}, "x"):
        with pytest.raises(ValueError, match=r"metadata=.* must be a dict of strings"):
            mpjax.checkpoint.save_safetensors(tmp_path / "p", PARAMS, metadata)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def written(file, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


EIGHTHS = [
    ("F8_E4M3", jnp.float8_e4m3fn),
    ("F8_E5M2", jnp.float8_e5m2),
    ("F8_E8M0", jnp.float8_e8m0fnu),
    ("F8_E4M3FNUZ", jnp.float8_e4m3fnuz),
    ("F8_E5M2FNUZ", jnp.float8_e5m2fnuz),
]


@pytest.mark.parametrize("name, dtype", EIGHTHS)
def test_load_safetensors_reads_8_bit_floats(name, dtype, tmp_path):
    values = np.array([[1, 2], [0.5, 4]]).astype(dtype)
    written(
        tmp_path / "p",
        {
            "n": {"dtype": "I32", "shape": [], "data_offsets": [4, 8]},
            "w": {"dtype": name, "shape": [2, 2], "data_offsets": [0, 4]},
            "none": {"dtype": name, "shape": [0, 3], "data_offsets": [4, 4]},
        },
        values.tobytes() + np.int32(7).tobytes(),
    )
    read = mpjax.checkpoint.load_safetensors(tmp_path / "p")
    assert read["w"].dtype == dtype and bits(read["w"]) == bits(values)
    assert read["n"] == 7 and read["none"].shape == (0, 3)
    like = {"n": jnp.int32(0), "w": jnp.ones((2, 2)), "none": jnp.ones((0, 3))}
    wide = mpjax.checkpoint.load_safetensors(tmp_path / "p", like)
    np.testing.assert_array_equal(wide["w"], values.astype(np.float32))


@pytest.mark.parametrize("name", ["F4", "F6_E2M3", "I4", "X", 3, None])
def test_load_safetensors_names_a_leaf_of_a_dtype_that_it_lacks(name, tmp_path):
    entry = {"dtype": name, "shape": [4], "data_offsets": [0, 2]}
    written(tmp_path / "p", {"layer.w": entry}, bytes(2))
    with pytest.raises(
        mpjax.checkpoint.CheckpointError, match=f"/p': 'layer.w' is {name!r}, a dtype"
    ):
        mpjax.checkpoint.load_safetensors(tmp_path / "p")


def test_load_safetensors_names_a_file_whose_header_is_wrong(tmp_path):
    """Each value of a header of any other type, or missing: no other error, no array made up."""
    file, good = tmp_path / "p", {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    others = (None, True, -1, 10**30, 0.5, "", "x", [], [[]], [2, 2], [0, 4], [4, 12], {})
    headers = [{"w": {**good, key: other}} for key in good for other in others]
    headers += [{"w": {k: v for k, v in good.items() if k != key}} for key in good]
    headers += [{"w": other} for other in others] + [{"w": good, "v": good}, [], 3, None, b"", b"{"]
    headers += [{"w": good, "__metadata__": other} for other in (3, [], {"a": 1})]
    headers += [b"[" * 10**5, b'{"w":' + json.dumps(good).encode() + b',"w":{}}', b"\xff\xfe"]
    for header in headers:
        written(file, header, np.ones(2, np.float32).tobytes())
        with pytest.raises(mpjax.checkpoint.CheckpointError, match="file='.*/p'"):
            mpjax.checkpoint.load_safetensors(file)
    written(file, {"w": good, "__metadata__": {"a": "b"}}, np.ones(2, np.float32).tobytes())
    assert mpjax.checkpoint.load_safetensors(file)["w"].sum() == 2
    file.write_bytes(struct.pack("<Q", 2**63) + file.read_bytes()[8:])
    with pytest.raises(mpjax.checkpoint.CheckpointError, match="not a complete"):
        mpjax.checkpoint.load_safetensors(file)


def test_save_safetensors_replaces_a_file_only_by_a_whole_one(tmp_path, monkeypatch):
    mpjax.checkpoint.save_safetensors(tmp_path / "p", {"w": jnp.ones(2)})

    def fail(arrays, file, metadata):
        with open(file, "wb") as half:
            half.write(b"half")
        raise OSError("no space")

    monkeypatch.setattr(stored, "save_file", fail)
    with pytest.raises(mpjax.checkpoint.CheckpointError, match="could not be written.*no space"):
        mpjax.checkpoint.save_safetensors(tmp_path / "p", {"w": jnp.zeros(2)})
    assert mpjax.checkpoint.load_safetensors(tmp_path / "p")["w"].sum() == 2
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_error_without_safetensors_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'mpjax\[safetensors\]'"):
        mpjax.checkpoint.load_safetensors("x")
