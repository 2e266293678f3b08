"""GraphCast's gradient, as WeatherNext's demo computes it, on made-up weather; then Adam's updates.

The demo is a notebook for a cloud bucket. Its functions are written here as there: the model in its
wrappers, the loss and `jax.value_and_grad`. "bfloat16" keeps the demo's own wrapper for 16 bits.
"""

import dataclasses
import sys

import haiku as hk
import jax
import numpy as np
import optax
import xarray
import xarray_jax
from weathernext.utils import autoregressive, casting, data_utils, normalization, xarray_tree
from weathernext.weathernext1_graph import graphcast

HALF = "bfloat16" in sys.argv[1:]
LEVELS = graphcast.TASK_13.pressure_levels
model_config = graphcast.ModelConfig(
    resolution=0,
    mesh_size=1,
    latent_size=32,
    gnn_msg_steps=2,
    hidden_layers=1,
    radius_query_fraction_edge_length=0.6,
)
task_config = graphcast.TASK_13


def weather(times):
    """Returns random fields on a coarse grid, with the demo's variables and coordinates."""
    rng = np.random.default_rng(0)
    lat, lon = np.linspace(-90, 90, 13), np.arange(0, 360, 15.0)
    hours = np.arange(times) * np.timedelta64(6, "h").astype("timedelta64[ns]")
    start = np.datetime64("2022-01-01", "ns")
    coords = {"lat": lat, "lon": lon, "level": list(LEVELS), "time": hours}
    coords["datetime"] = (("batch", "time"), (start + hours)[None])
    sizes = {"batch": 1, "time": times, "level": len(LEVELS), "lat": len(lat), "lon": len(lon)}
    fields = {}
    derived = {"year_progress_sin", "year_progress_cos", "day_progress_sin", "day_progress_cos"}
    wanted = {*task_config.input_variables, *task_config.target_variables}
    for name in sorted((wanted | {*task_config.forcing_variables}) - derived):
        if name in ("geopotential_at_surface", "land_sea_mask"):
            dims = ("lat", "lon")
        elif name in graphcast.TARGET_ATMOSPHERIC_VARS:
            dims = ("batch", "time", "level", "lat", "lon")
        else:
            dims = ("batch", "time", "lat", "lon")
        fields[name] = (dims, rng.normal(size=[sizes[x] for x in dims]).astype(np.float32))
    return xarray.Dataset(fields, coords)


batch = weather(3)
inputs, targets, forcings = data_utils.extract_inputs_targets_forcings(
    batch, target_lead_times=slice("6h", "6h"), **dataclasses.asdict(task_config)
)
names = {*inputs.data_vars, *targets.data_vars, *forcings.data_vars}
by_level = {x for x in names if x in graphcast.TARGET_ATMOSPHERIC_VARS}
statistics = {
    name: xarray.Dataset(
        {
            x: (("level",), np.full(len(LEVELS), value, np.float32))
            if x in by_level
            else ((), np.float32(value))
            for x in names
        },
        {"level": list(LEVELS)},
    )
    for name, value in (("diffs_stddev_by_level", 1), ("mean_by_level", 0), ("stddev_by_level", 1))
}


def construct_wrapped_graphcast():
    predictor = graphcast.GraphCast(model_config, task_config)
    if HALF:
        predictor = casting.Bfloat16Cast(predictor)
    predictor = normalization.InputsAndResiduals(predictor, **statistics)
    return autoregressive.Predictor(predictor, gradient_checkpointing=True)


@hk.transform_with_state
def run_forward(inputs, targets_template, forcings):
    predictor = construct_wrapped_graphcast()
    return predictor(inputs, targets_template=targets_template, forcings=forcings)


@hk.transform_with_state
def loss_fn(inputs, targets, forcings):
    predictor = construct_wrapped_graphcast()
    loss, diagnostics = predictor.loss(inputs, targets, forcings)
    return xarray_tree.map_structure(
        lambda x: xarray_jax.unwrap_data(x.mean(), require_jax=True), (loss, diagnostics)
    )


def grads_fn(params, state, inputs, targets, forcings):
    def _aux(params, state, i, t, f):
        (loss, diagnostics), next_state = loss_fn.apply(
            params, state, jax.random.PRNGKey(0), i, t, f
        )
        return loss, (diagnostics, next_state)

    (loss, (diagnostics, next_state)), grads = jax.value_and_grad(_aux, has_aux=True)(
        params, state, inputs, targets, forcings
    )
    return loss, diagnostics, next_state, grads


params, state = jax.jit(run_forward.init)(
    rng=jax.random.PRNGKey(0), inputs=inputs, targets_template=targets, forcings=forcings
)
optimizer = optax.adam(1e-3)
opt_state = optimizer.init(params)
grads_fn_jitted = jax.jit(grads_fn)
for step in range(3):
    loss, diagnostics, state, grads = grads_fn_jitted(params, state, inputs, targets, forcings)
    updates, opt_state = jax.jit(optimizer.update)(grads, opt_state)
    params = optax.apply_updates(params, updates)
    print(f"step {step} loss {loss:.9g}")
