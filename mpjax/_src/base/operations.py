"""Operations of other libraries, by the primitives that compute them. Only errors read it."""

import re

_SUMS = "reduce_sum"
_NORM = "rsqrt reduce_sum"
_ENTROPY = "exp log reduce_max reduce_sum"
OPERATIONS = {
    "dot_general": """matmul batchmatmul mm bmm mv addmm addbmm baddbmm addmv addr linear dense fc
        einsum dot vdot tensordot multidot chainmatmul innerproduct fullyconnected gemm""",
    "conv_general_dilated": """conv conv1d conv2d conv3d convolution convtbc convtranspose
        convtranspose1d convtranspose2d convtranspose3d depthwiseconv2d depthwiseconv2dnative
        conv2dtranspose conv2dbackpropinput conv2dbackpropfilter cudnnconvolution""",
    "dot_general exp reduce_max reduce_sum div": """attention dotproductattention
        scaleddotproductattention fusedattention flashattention multiheadattention
        multiheaddotproductattention""",
    "exp reduce_max reduce_sum div": "softmax softmin csoftmax softmax2d",
    _ENTROPY: """logsoftmax logsumexp crossentropy crossentropyloss nllloss softmaxcrossentropy
        softmaxwithcrossentropy csoftmaxwithcrossentropy softmaxcrossentropywithlogits
        sparsesoftmaxcrossentropywithlogits softmaxcrossentropywithintegerlabels""",
    "exp log1p": """softplus binarycrossentropy binarycrossentropywithlogits bcewithlogits
        sigmoidcrossentropywithlogits sigmoidbinarycrossentropy logsigmoid logaddexp""",
    _NORM: """layernorm layernormalization groupnorm batchnorm batchnormalization instancenorm
        rmsnorm syncbatchnorm fusedbatchnorm nativelayernorm""",
    "sqrt reduce_sum": "norm pnorm l2norm l2normalize cdist pdist dist renorm std",
    _SUMS: """sum mean average reducemean sumallreduce mseloss l1loss smoothl1loss kldiv
        squaredl2norm l2loss""",
    "reduce_max": "amax reducemax globalmaxpool",
    "reduce_min": "amin reducemin",
    "reduce_prod": "prod reduceprod",
    "reduce_window_sum div": "avgpool avgpool2d averagepool pool2d meanpool",
    "reduce_window_max": "maxpool maxpool2d",
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
_PRIMITIVES = {name: row for row, names in OPERATIONS.items() for name in names.split()}


def primitives_of(operation: str) -> str:
    """Returns `` It consists of the primitives 'exp', ...``, or "" for an unknown operation."""
    last = re.split(r"[.:]", operation)[-1].lower()  # of "torch.softmax" and "aten::mm"
    row = _PRIMITIVES.get(re.sub(r"_v\d$|_p$|[^a-z0-9]", "", last), "").split()
    if len(row) < 2:
        return f" Write {row[0]!r}, the primitive that computes it." if row else ""
    return (
        f" It consists of several, such as {', '.join(map(repr, row))}, which other operations use "
        "too. To choose the dtype of this one alone, call it in a block of "
        'mpjax.precision("float32").'
    )
