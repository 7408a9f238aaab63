"""Tools for people who write kernels: is my op right, and how would I know?

Example, for an op of one's own:

    from opsnn_jax import check

    x = jax.random.normal(key, (4, 33))
    check.check_grads(my_op, x).raise_if_failed()           # against differences
    check.assert_close(my_op, plain_op, x, grads=True)      # against float64
    print(check.compare(my_op, plain_op, x))                # the same, as a table
    case = check.OpCase("odd", lambda key, dtype: (x.astype(dtype),))
    report = check.check_op(                                # the whole contract
        my_op, reference=plain_op, cases=[case], dtypes=["float32", "bfloat16"]
    )
    report.raise_if_failed()

`layerwise`, `sensitivity` and `precision_sweep` find where a model or a function loses
its precision; `compare_frameworks` holds an op against PyTorch. Strategies for
hypothesis are in `opsnn_jax.check.strategies`, the library's own cases in
`opsnn_jax.check.library`.
"""

from .compare import Comparison, assert_close, compare
from .contract import OpCase, check_op
from .contract_report import Report
from .frameworks import compare_frameworks
from .gradient_report import GradientReport
from .gradients import check_grads
from .layers import LayerReport, layerwise
from .levels import LEVELS, Limits
from .precision import PrecisionReport, precision_sweep
from .sensitivity import SensitivityReport, sensitivity
from .stored_call import load_arguments, load_options

__all__ = [
    "LEVELS",
    "Comparison",
    "GradientReport",
    "LayerReport",
    "Limits",
    "OpCase",
    "PrecisionReport",
    "Report",
    "SensitivityReport",
    "assert_close",
    "check_grads",
    "check_op",
    "compare",
    "compare_frameworks",
    "layerwise",
    "load_arguments",
    "load_options",
    "precision_sweep",
    "sensitivity",
]
