"""What every test runs under: eight CPU devices, strict mode, and a kernel cache of its own."""

from __future__ import annotations

import importlib.util
import os

# Before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["HLOFUSE_STRICT"] = "1"
os.environ.pop("HLOFUSE_DUMP_TO", None)

import pytest

from hlofuse import api
from hlofuse.frontend import jax_compat
from hlofuse.runtime import call_worth, primitive


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected part of golden files")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session", autouse=True)
def _own_kernel_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HLOFUSE_CACHE_DIR", str(tmp_path_factory.mktemp("kernel_cache")))
        yield


@pytest.fixture(autouse=True)
def _small_kernels_too(monkeypatch: pytest.MonkeyPatch):
    """Tests are small: their kernels run even where XLA would be left to do so little."""
    monkeypatch.setattr(call_worth, "CALL_WORK", 0)
    monkeypatch.setattr(call_worth, "THREADS_WORK", 0)


class EvaluatingExecutable:
    """What `evaluating_pipeline` makes of a jaxpr: the jaxpr itself, as if it were one kernel."""

    kernels = ("evaluate",)

    def __init__(self, closed):
        self.closed = closed

    def __call__(self, *operands, donated):
        return jax_compat.eval_closed(self.closed, *operands)

    def explain(self) -> str:
        return "evaluated"


def evaluating_pipeline(closed, options, platform):
    return EvaluatingExecutable(closed)


@pytest.fixture
def set_pipeline():
    """`primitive.set_pipeline`, for the duration of a test."""
    yield primitive.set_pipeline
    primitive.set_pipeline(api._compile)


@pytest.fixture
def any_pipeline(set_pipeline):
    """The real pipeline where it exists, else one that evaluates: for tests of JAX and the primitive together."""
    if importlib.util.find_spec("hlofuse.compiler") is None:
        set_pipeline(evaluating_pipeline)
