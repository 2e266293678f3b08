"""What a policy asks of an optimizer: settings without effect, and one loss scale alone."""

import warnings

import numpy as np
import optax
import pytest
from problems import linear_loss

import mpjax

PARAMS = {"w": np.ones(2, np.float32)}


def build(policy):
    return mpjax.build_train_step(linear_loss, optax.adam(0.1), policy)


@pytest.mark.parametrize("wrap", [lambda p: mpjax.mixed_precision(optax.adam(0.1), p), build])
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("O1:bfloat16,rounding=stochastic", "=stochastic has no effect: all parameters .* An O3"),
        ("mixed_float16,masters=split", "masters=split has no effect: all .* in float32.* An O2"),
        (
            'O1:bfloat16,overrides={"w": "bf16"},rounding=kahan',
            "no effect: the policy keeps master weights. Add master_weights=false",
        ),
    ],
)
def test_policy_setting_for_16_bit_weights_warns_where_there_are_none(wrap, policy, message):
    with pytest.warns(UserWarning, match=message) as caught:
        wrap(policy)
    assert [c.filename for c in caught] == [__file__]


@pytest.mark.parametrize(
    "policy",
    [
        *("O2:bfloat16,masters=split", "O3:bfloat16,rounding=kahan", "O1:bfloat16,moments=8bit"),
        'O1:bfloat16,overrides={"w": "bf16"},masters=split',
        'O1:bfloat16,overrides={"w": "bf16"},master_weights=false,rounding=stochastic',
    ],
)
def test_policy_setting_with_an_effect_draws_no_warning(policy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpjax.mixed_precision(optax.adam(0.1), policy)


@pytest.mark.parametrize("around", [lambda inner: inner, lambda inner: optax.chain(inner)])
def test_mixed_precision_within_mixed_precision_is_refused(around):
    inner = around(mpjax.mixed_precision(optax.adam(0.1), "mixed_float16"))
    with pytest.raises(ValueError, match="optimizer is in mixed precision already"):
        mpjax.mixed_precision(inner, "mixed_float16").init(PARAMS)
    with pytest.raises(ValueError, match="optimizer is in mixed precision already"):
        mpjax.build_train_step(linear_loss, inner).init(PARAMS)
    assert mpjax.optim.skip_nonfinite(inner).init(PARAMS).inner_state  # has no scale itself
