"""`opsnn compile`: what a device's compiler makes of a function, without the device."""

import argparse
import ast
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opsnn_jax.aot.compile import compile_for
from opsnn_jax.aot.targets import TARGETS, get_target
from opsnn_jax.aot.toolchain import MissingToolchain
from opsnn_jax.aot.words import raised_in

_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i32": "int32",
    "u8": "uint8",
    "bool": "bool",
}
_SHAPE = re.compile(r"(\d+(?:x\d+)*)?:(\w+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to its parser."""
    parser.add_argument(
        "function",
        metavar="OP|module:function",
        help="an op of opsnn_jax, or a function to import; OP@NAME is OP with "
        "implementation NAME",
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="TARGET",
        help=f"{', '.join(TARGETS)}; may be repeated (default: tpu-v5e)",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="8x28x28x256:bf16",
        help="shape and dtype of the next argument; ':f32' is a scalar",
    )
    parser.add_argument("--implementation", help="of the op; by default it is chosen")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument, its value as in Python; may be repeated",
    )
    parser.add_argument(
        "--vjp",
        action="store_true",
        help="compile forward and backward, for a cotangent of every output",
    )
    parser.add_argument(
        "--compare", metavar="OTHER", help="a second function, set beside the first"
    )
    parser.add_argument("--rate", help="dtype whose peak rate bounds the products")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      0 if everything compiles, 1 if the compiler refuses something, 2 if the request
      cannot be carried out, as where the function fails before a compiler sees it.
    """
    try:
        specs = tuple(parse_shape(text) for text in args.shape)
        options = dict(parse_option(text) for text in args.option)
        named = [(args.function, args.implementation)]
        if args.compare:
            named.append((args.compare, None))
        functions = [
            (name, find_function(name, implementation, options))
            for name, implementation in named
        ]
        if args.html:
            check_page(args.html)
        targets = args.target or ["tpu-v5e"]
        for target in targets:  # a typo in the last is found before the first compiles
            get_target(target)
        reports = []
        for target in targets:
            for name, f in functions:
                reports.append(
                    compile_for(
                        f,
                        *specs,
                        target=target,
                        name=f"{name} vjp" if args.vjp else name,
                        rate=args.rate,
                        vjp=args.vjp,
                    )
                )
    except (MissingToolchain, ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(f"[{', '.join(r.to_json() for r in reports)}]")
    else:
        from rich.console import Console

        from opsnn_jax.aot.table import print_reports

        print_reports(reports, Console())
    if args.html:
        from opsnn_jax.aot.page import render_page

        args.html.write_text(render_page(reports))
    if any(r.stage == "trace" for r in reports):
        return 2
    return 0 if all(r.ok for r in reports) else 1


def check_page(path: Path) -> None:
    """Raises ValueError where no page can be written, before anything is compiled."""
    if path.is_dir():
        raise ValueError(
            f"compile: --html must be a file; got the folder {str(path)!r}."
        )
    if not path.parent.is_dir():
        raise ValueError(f"compile: --html: there is no folder {path.parent}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"compile: --html: {path} cannot be written.")


def parse_shape(text: str) -> Any:
    """`8x128:bf16` as a `jax.ShapeDtypeStruct`. Raises ValueError otherwise."""
    import jax
    import jax.numpy as jnp

    match = _SHAPE.fullmatch(text)
    dtype = _DTYPES.get(match[2], match[2]) if match else ""
    try:
        shape = tuple(int(n) for n in (match[1] or "").split("x") if n)
        # NumPy has dtypes, such as str, that no array of JAX has.
        return jax.ShapeDtypeStruct(shape, getattr(jnp, jnp.dtype(dtype).name))
    except (TypeError, AttributeError):
        raise ValueError(
            "compile: --shape must be like 8x28x28x256:bf16, a shape and one of "
            f"{', '.join(_DTYPES)} or a dtype's full name; got {text!r}."
        ) from None


def parse_option(text: str) -> tuple[str, Any]:
    """`strides=(2, 2)` as a name and a value; what is no Python literal is a string."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise ValueError(f"compile: --option must be NAME=VALUE; got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def find_function(
    name: str, implementation: str | None, options: dict[str, Any]
) -> Callable:
    """The function called `module:function`, `OP` or `OP@implementation`."""
    name, _, at = name.partition("@")
    implementation = at or implementation
    module, colon, attribute = name.partition(":")
    if not colon:
        module, attribute = "opsnn_jax", name
    try:
        # As under `python -m`, modules of the current folder can be named.
        if "" not in sys.path:
            sys.path.insert(0, "")
        f = functools.reduce(
            getattr, attribute.split("."), importlib.import_module(module)
        )
    except (Exception, SystemExit) as error:  # importing runs the module
        where = raised_in(error.__traceback__, besides=[__file__])
        said = f"{type(error).__name__}: {error}{where and ', '}{where}"
        said = " ".join(said.split())
        raise ValueError(
            f"compile: expected an op of opsnn_jax or module:function; got {name!r} "
            f"({said})."
        ) from None
    if not callable(f):
        raise ValueError(f"compile: {name!r} is not a function, it is {f!r}.")
    if implementation:
        options = {**options, "implementation": implementation}
    return functools.partial(f, **options) if options else f
