"""Models and servers of the end-to-end tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME
from support.reference_tokens import Reference, smollm2_references, tiny_references
from support.small_tokenizer import BOS, CHAT_TEMPLATE, EOS, byte_level_json
from support.tiny_models import TinyModel, save_tiny_model

TINY_VOCAB_SIZE = 512
TINY_MAX_LEN = 1024


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A random Llama of 3 layers with a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny = save_tiny_model(
        "llama",
        folder,
        vocab_size=TINY_VOCAB_SIZE,
        max_position_embeddings=TINY_MAX_LEN,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    (folder / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tiny


@pytest.fixture(scope="session")
def tiny_model(tiny_llama: TinyModel) -> PreparedModel:
    return PreparedModel(tiny_llama.folder, SERVED_NAME)


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
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120.0)
