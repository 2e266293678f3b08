"""The only package that uses JAX's internals or depends on differences between its versions.

It offers what these modules define, and `building` and `held` apart. It imports nothing of mpjax
but `lines`. tests/core/base/_jax has a test for each assumption about JAX that is computed here.
"""

from jax.core import Tracer
from jax.extend.core import Literal

from mpjax._src.core.base._jax import gpu_matmuls  # their lowering
from mpjax._src.core.base._jax.aot import *
from mpjax._src.core.base._jax.backward import *
from mpjax._src.core.base._jax.barriers import *
from mpjax._src.core.base._jax.calls import *
from mpjax._src.core.base._jax.convolutions import *
from mpjax._src.core.base._jax.cpu_matmuls import *
from mpjax._src.core.base._jax.differentiating import *
from mpjax._src.core.base._jax.jits import *
from mpjax._src.core.base._jax.keys import *
from mpjax._src.core.base._jax.literals import *
from mpjax._src.core.base._jax.matmuls import *
from mpjax._src.core.base._jax.partitioning import *
from mpjax._src.core.base._jax.programs import *
from mpjax._src.core.base._jax.recurrences import *
from mpjax._src.core.base._jax.sources import *
from mpjax._src.core.base._jax.wire import *
