"""What all tests share: the logs of running servers beside a failure, and kernels that run without a GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Generator

import hypothesis
import pytest

hypothesis.settings.register_profile("octavo", deadline=None)  # a loaded machine is no fault of what is tested
hypothesis.settings.load_profile("octavo")

if importlib.util.find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, which importing its module does

_LOG_CHARS = 20_000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    clusters = sys.modules.get("support.clusters")
    if report.failed and clusters is not None:
        for cluster in clusters.Cluster.running:
            report.sections.append((f"log of {cluster.settings}", cluster.log()[-_LOG_CHARS:]))
    return report
