"""Which operations run in which precision: the op sets, as data.

The sets merge the lists of torch, Apex, Paddle, MindSpore and TensorFlow's graph pass, in the names
of JAX's primitives. A primitive in none of them is left alone. `Policy.with_ops` overrides a row
for one policy; what the sets mean to a program is in `plan`.
"""


def names(text: str) -> frozenset[str]:
    """Returns the set of the words of a text."""
    return frozenset(text.split())


# Half operands on the matrix units, float32 accumulation inside.
HALF = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})

# Of those, the ones that can hand out their float32 accumulator.
MATMULS = frozenset({"dot_general", "ragged_dot_general"})

# Float32 from their operands to their result, and their operand's relative rounding error comes
# out amplified: what feeds them is not rounded to half on the way, not even a matmul's result.
SENSITIVE = names(
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cos cosh digamma "
    "erf_inv erfc exp exp2 expm1 igamma igamma_grad_a igammac lgamma log log1p polygamma "
    "pow random_gamma regularized_incomplete_beta sin sinh tan zeta cumlogsumexp cumprod "
    "cumsum reduce_prod cholesky cholesky_update eig eigh geqrf hessenberg "
    "householder_product lu ormqr qr schur svd symmetric_product triangular_solve "
    "tridiagonal tridiagonal_solve fft"
)

# Float32 from their operands to their result; a half operand costs them one rounding.
TOLERANT = names(
    "integer_pow rsqrt square reduce_sum reduce_window_sum select_and_scatter_add "
    "scatter-add scatter-sub scatter-mul psum psum_invariant reduce_scatter "
    "unreduced_psum"
)
FULL = SENSITIVE | TOLERANT

# Small results from large operands: stored in float32, which costs nothing.
REDUCTIONS = names(
    "reduce_sum reduce_prod reduce_max reduce_min reduce_window_sum argmax argmin reduce"
)

# No compiler has a half-precision form of these, whatever a list or a region asks for.
FLOAT32_ONLY = names(
    "bitcast_convert_type cholesky cholesky_update complex eig eigh fft geqp3 geqrf hessenberg "
    "householder_product lu ormqr qr reduce reduce_window scatter-add scatter-max scatter-min "
    "scatter-mul scatter-sub schur svd symmetric_product tridiagonal tridiagonal_solve"
)

# What is not an operation with a dtype of its own: programs, kernels, the user's casts.
NOT_LISTED = names(
    "closed_call cond convert_element_type custom_partitioning custom_vjp_call "
    "custom_vmap_call ffi_call jit linear_call pallas_call pjit remat2 scan shard_map while"
)

# Elementwise arithmetic: the dtype of its operands.
ELEMENTWISE = names(
    "abs add add_any cbrt ceil clamp div erf floor logistic max min mul neg rem round "
    "select_n sign sqrt sub tanh"
)

# Piecewise linear: their derivative wants to know on which side of a kink the operand was.
KINKED = names("clamp custom_jvp_call max min")

# No arithmetic: the dtype that needs the fewest casts.
LAYOUT = names(
    "all_gather all_gather_invariant all_gather_reduced all_to_all broadcast_in_dim "
    "concatenate copy copy_p cummax cummin dynamic_slice dynamic_update_slice gather "
    "layout_constraint name optimization_barrier pad pbroadcast pmax pmin ppermute pvary "
    "real_copy reduce_max reduce_min reduce_window_max reduce_window_min reshape reshard "
    "rev sharding_constraint slice sort split squeeze stack stop_gradient tile top_k "
    "transpose unstack vary_unreduced_cast_p"
)
FOLLOW = ELEMENTWISE | LAYOUT

# Of those, the ones whose transpose sums.
SUMS_COTANGENTS = names("all_gather broadcast_in_dim gather pbroadcast pvary")

# Read floats, give none: they accept whatever their operands happen to be stored in.
NEUTRAL = names("argmax argmin eq ge gt is_finite le lt ne")

# Floats that are made from bits or integers: half has too few bits for them.
FROM_BITS = names("bitcast_convert_type iota rng_uniform")

# Layout operations through which a value stays "the same parameter" to a path pattern.
CARRIES_PATH = names(
    "broadcast_in_dim convert_element_type copy copy_p dynamic_slice gather "
    "layout_constraint optimization_barrier pvary rev reshape reshard sharding_constraint "
    "slice split squeeze stop_gradient transpose unstack"
)

# Of those, the ones that a known constant stays one through.
KEEPS_CONSTANT = names("broadcast_in_dim convert_element_type copy reshape squeeze transpose")

# What a running sum or average goes through between two turns of a loop.
ACCUMULATES = CARRIES_PATH | names("add add_any div dynamic_update_slice mul neg select_n sub")

# Sums that differentiation writes: their terms cancel by nature.
BACKWARD_SUMS = names("add_any conv_general_dilated dot_general reduce_sum scatter-add")

# Cheap to compute again from their operands, so a float32 island may be recomputed in the backward
# pass. Reductions belong to an island too, but their (small) results are kept.
RECOMPUTED = (
    ELEMENTWISE
    | NEUTRAL
    | names(
        "acos acosh and asin asinh atan atan2 atanh broadcast_in_dim convert_element_type copy cos "
        "cosh custom_jvp_call erf_inv erfc exp exp2 expm1 integer_pow iota log log1p not or "
        "pow reduce_max reduce_min reduce_prod reduce_sum reshape rsqrt sin sinh square "
        "squeeze stop_gradient tan transpose"
    )
)
