"""A pytest plugin that writes down how tests failed, and whose code they ran.

    pytest -p tests.mutants.verdict --verdict FILE ...

FILE becomes JSON: `caught`, the tests that failed by an assertion; `crashed`, those
that failed in another way; `strangers`, modules of the package from outside the root.
"""

import json
import sys
from pathlib import Path

import pytest

_PACKAGE = "opsnn_jax"


def pytest_addoption(parser):
    parser.addoption("--verdict", metavar="FILE", type=Path)


def pytest_configure(config):
    config.pluginmanager.register(_Verdict(config))


class _Verdict:
    def __init__(self, config):
        self.root, self.file = config.rootpath, config.getoption("--verdict")
        self.failed = {"caught": [], "crashed": []}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed:
            judged = call.when == "call" and _is_judgement(call.excinfo.value)
            self.failed["caught" if judged else "crashed"].append(item.nodeid)
        return report

    def pytest_sessionfinish(self):
        root = self.root.resolve()
        strangers = [
            name
            for name, module in sys.modules.items()
            if name.split(".")[0] == _PACKAGE
            and not Path(module.__file__).resolve().is_relative_to(root)
        ]
        self.file.write_text(json.dumps(self.failed | {"strangers": strangers}))


def _is_judgement(error: BaseException) -> bool:
    """Whether a test failed because something was wrong, not because it broke down."""
    missed = isinstance(error, pytest.fail.Exception) and "DID NOT RAISE" in str(error)
    return missed or isinstance(error, AssertionError)
