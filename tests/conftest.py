"""Engines are built once a session: vLLM takes a while to start, and a process holds one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from estr_lite.config import Config
from tests.lab import Lab, open_lab

settings.register_profile("lab", deadline=None, derandomize=True)  # a busy machine is no failure
settings.load_profile("lab")

HAVE_VLLM = importlib.util.find_spec("vllm") is not None
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="session")
def transformers_lab() -> Iterator[Lab]:
    with open_lab("transformers", Config(), versions=6) as lab:
        yield lab


@pytest.fixture(scope="session")
def vllm_installed() -> None:
    """Skips where there is no vLLM, and fails where there should be."""
    if not HAVE_VLLM:
        if os.environ.get("ESTR_LITE_REQUIRE_VLLM"):
            pytest.fail("ESTR_LITE_REQUIRE_VLLM is set, but vLLM is not installed")
        pytest.skip("vLLM is not installed; make setup installs it on Linux")


@pytest.fixture(scope="session")
def vllm_lab(vllm_installed: None) -> Iterator[Lab]:
    with open_lab("vllm", Config(), versions=6, core=len(os.sched_getaffinity(0)) - 1) as lab:
        yield lab


@pytest.fixture(params=ENGINES)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Each engine in turn; whatever a test set is set back."""
    found: Lab = request.getfixturevalue(f"{request.param}_lab")
    yield found
    found.set_kv("keep")
