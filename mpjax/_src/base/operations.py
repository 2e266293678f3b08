"""Operations of other libraries, by the primitives that compute them. Only errors read it."""

import re
from fnmatch import fnmatchcase

# The first row with a pattern that fits is taken.
OPERATIONS = {
    "dot_general exp reduce_max reduce_sum div": "attention *attention",
    "conv_general_dilated": "conv2d *conv*",
    "exp log1p": "softplus *binarycrossentropy* sigmoidcross* bce* logsigmoid logaddexp",
    "exp log reduce_max reduce_sum": "crossentropy *crossentropy* logsoftmax logsumexp nllloss",
    "exp reduce_max reduce_sum div": "softmax *softmax* softmin",
    "dot_general": """matmul *matmul *mm *mv addr linear dense fc einsum dot vdot tensordot multidot
        innerproduct fullyconnected""",
    "sqrt reduce_sum": "norm pnorm renorm l2norm* *dist std",
    "reduce_sum": "sum mean *mean average sumallreduce mseloss *l1loss l2loss kldiv *l2norm",
    "rsqrt reduce_sum": "layernorm *norm *normalization",
    "reduce_max": "amax reducemax globalmaxpool",
    "reduce_min": "amin reducemin",
    "reduce_prod": "prod reduceprod",
    "reduce_window_sum div": "avgpool avgpool* averagepool* meanpool pool2d",
    "reduce_window_max": "maxpool maxpool*",
    "logistic": "sigmoid expit silu swish glu",
    "tanh mul": "gelu",
    "pow": "power elementwisepow",
    "log": "ln log10 log2",
    "add": "biasadd elementwiseadd addn plus",
    "sub": "elementwisesub subtract minus",
    "mul": "elementwisemul multiply",
    "div": "elementwisediv divide truedivide realdiv",
    "max": "relu maximum elementwisemax",
    "min": "minimum elementwisemin",
    "gather": "embedding lookuptable embeddinglookup take indexselect",
}


def primitives_of(operation: str) -> str:
    """Returns `` It consists of several, such as 'exp', ...``, or "" for an unknown operation."""
    last = re.split(r"[.:]", operation)[-1].lower()  # of "torch.softmax" and "aten::mm"
    name = re.sub(r"_v\d$|_p$|[^a-z0-9]", "", last)
    rows = (row for row, names in OPERATIONS.items() for n in names.split() if fnmatchcase(name, n))
    row = next(rows, "").split()
    if len(row) < 2:
        return f" Write {row[0]!r}, the primitive that computes it." if row else ""
    return (
        f" It consists of several, such as {', '.join(map(repr, row))}, which other operations use "
        "too. To choose the dtype of this one alone, call it in a block of "
        'mpjax.precision("float32").'
    )
