"""Operations of other libraries, by the primitives that compute them. Only errors read it."""

import re
from fnmatch import fnmatchcase

# Primitives, and the names of operations. The first row with a pattern that fits is taken.
TABLE = """\
dot_general exp reduce_max reduce_sum div: attention *attention flashattn*
conv_general_dilated: conv2d *conv*
exp log1p: softplus *binarycrossentropy* sigmoidcross* bce* logsigmoid logaddexp
exp log reduce_max reduce_sum: crossentropy *crossentropy* logsoftmax logsumexp nllloss ctcloss
exp reduce_max reduce_sum div: softmax *softmax* softmin
dot_general: matmul *matmul *mm *mv addr linear dense fc einsum dot *vdot *vecdot tensordot \
    *multidot innerproduct fullyconnected interpolate upsample* resize*
sqrt reduce_sum: norm pnorm renorm l2norm* *dist std cosine*
reduce_sum: sum mean *mean average sumallreduce *loss kldiv *l2norm
rsqrt reduce_sum: layernorm *norm *normalization
reduce_max: amax reducemax globalmaxpool
reduce_min: amin reducemin
reduce_prod: prod reduceprod
reduce_window_sum div: avgpool avgpool* averagepool* meanpool pool2d
reduce_window_max: maxpool maxpool*
logistic: sigmoid expit silu swish glu
dot_general logistic tanh: lstm lstm* *lstmcell gru* rnn*
tanh mul: gelu mish
select_n mul: prelu rrelu leakyrelu elu selu celu hardswish hardsigmoid dropout*
pow: power elementwisepow
log: ln log10 log2
add: biasadd elementwiseadd addn plus
sub: elementwisesub subtract minus
mul: elementwisemul multiply addcmul
div: elementwisediv divide truedivide realdiv reciprocal addcdiv
max: relu maximum elementwisemax
min: minimum elementwisemin
gather: embedding lookuptable embeddinglookup take indexselect gridsample
concatenate: cat concat hstack vstack
select_n: where
"""
OPERATIONS = dict(line.split(": ") for line in TABLE.splitlines())


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
