"""Models and servers of the end-to-end tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from octavo.cli.models import PreparedModel
from octavo.cli.simulated_model import prepare_simulated_model
from support.clusters import H200, Cluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME
from support.reference_tokens import Reference, smollm2_references, tiny_references
from support.served_llama import save_served_llama
from support.tiny_models import TinyModel


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A random Llama of 3 layers with a byte-level tokenizer and a chat template."""
    return save_served_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_model(tiny_llama: TinyModel) -> PreparedModel:
    return PreparedModel(tiny_llama.folder, SERVED_NAME)


@pytest.fixture(scope="session")
def simulated_model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """What a simulated worker serves: made-up words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(tmp_path_factory.mktemp("cache")))
        return prepare_simulated_model(H200, None, print)


@pytest.fixture(scope="session")
def references(tiny_llama: TinyModel) -> list[Reference]:
    """Greedy tokens of the tiny model for prompts around the borders of blocks and chunks."""
    return tiny_references(tiny_llama, num_tokens=40)


@pytest.fixture(scope="session")
def real_model() -> PreparedModel:
    """SmolLM2: the folder in OCTAVO_TEST_MODEL, else the default model, which is fetched if need be."""
    folder = os.environ.get("OCTAVO_TEST_MODEL")
    if folder is None:
        command = [sys.executable, "-m", "octavo.cli.main", "model", "path"]
        folder = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return PreparedModel(Path(folder), SERVED_NAME)


@pytest.fixture(scope="session")
def real_references() -> list[Reference]:
    return smollm2_references()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tiny_model: PreparedModel) -> Iterator[Cluster]:
    """The tiny model, served as the parameter says. It must end without a leak or a broken message."""
    settings: ServerSettings = getattr(request, "param", ServerSettings())
    with running_cluster(tiny_model, settings) as running:
        yield running
        running.assert_idle()
        running.assert_undisturbed()


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of the cluster."""
    async with official_client(cluster) as opened:
        yield opened


def official_client(cluster: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=300.0)
