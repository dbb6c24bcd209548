"""The gateway as a process of its own, with the scheduler behind a Unix socket or gRPC."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from octavo.common.codecs import GENERATE
from octavo.common.links import Address, listen
from octavo.common.messages.generation import ModelInfo
from octavo.gateway.config import GatewayConfig
from support.running_gateway import EOS_ID, MAX_MODEL_LEN, VOCAB_SIZE, says
from support.scripted_scheduler import ScriptedScheduler
from support.small_tokenizer import CHAT_TEMPLATE, byte_level_json

MODEL = ModelInfo("m", MAX_MODEL_LEN, VOCAB_SIZE, (EOS_ID,), max_num_seqs=32, block_size=16)


def model_folder(path: Path) -> Path:
    (path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


async def start(model: Path, scheduler: Address, port: int) -> asyncio.subprocess.Process:
    arguments = ["--model", str(model), "--scheduler", str(scheduler), "--port", str(port)]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "octavo.gateway.main", *arguments, stderr=asyncio.subprocess.PIPE
    )


async def ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                if (await http.get("/health/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("carrier", ["frames", "grpc"])
async def test_process_serves_and_ends_in_order(tmp_path: Path, carrier: str) -> None:
    text = f"frames://{tmp_path}/s.sock" if carrier == "frames" else f"grpc://127.0.0.1:{free_port()}"
    address, port = Address.parse(text), free_port()
    process = await start(model_folder(tmp_path), address, port)
    scheduler = ScriptedScheduler(MODEL, says(" 4 5 6"))
    listener = await listen([address], GENERATE, scheduler.accept)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as http:
        await ready(http)
        answer = (await http.post("/v1/completions", json={"prompt": "Count: 1 2 3"})).json()
        assert answer["choices"][0]["text"] == " 4 5 6"
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(5):
        _, log = await process.communicate()
    await listener.close(0)
    assert process.returncode == 0, log.decode()
    assert b"Traceback" not in log


async def test_address_that_is_taken_ends_the_process_with_a_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address.parse(f"frames://{tmp_path}/s.sock")
        process = await start(model_folder(tmp_path), address, taken.getsockname()[1])
        _, log = await process.communicate()
    assert process.returncode == 1
    assert b"in use" in log
    assert b"Traceback" not in log


async def test_model_folder_without_tokenizer_ends_the_process_with_a_reason(tmp_path: Path) -> None:
    process = await start(tmp_path, Address.parse(f"frames://{tmp_path}/s.sock"), 0)
    _, log = await process.communicate()
    assert process.returncode == 1
    assert b"tokenizer.json does not exist" in log


@pytest.mark.parametrize(
    ("name", "reason"),
    [("tokenizer.json", b"tokenizer.json is no tokenizer"), ("tokenizer_config.json", b"config.json is no JSON")],
)
async def test_model_file_that_is_broken_is_named(tmp_path: Path, name: str, reason: bytes) -> None:
    (model_folder(tmp_path) / name).write_text("{broken")
    process = await start(tmp_path, Address.parse(f"frames://{tmp_path}/s.sock"), 0)
    _, log = await process.communicate()
    assert process.returncode == 1
    assert reason in log and b"Traceback" not in log


def test_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("none")
    arguments = ["--model", "m", "--scheduler", "frames:///s", "--tls-cert", f"{tmp_path}/cert.pem"]
    with pytest.raises(ValidationError, match=r"cert\.pem and .*cert\.pem are no certificate and its key"):
        GatewayConfig(_cli_parse_args=[*arguments, "--tls-key", f"{tmp_path}/cert.pem"])  # type: ignore[call-arg]


async def test_gateway_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, octavo.gateway.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


STARTS_PROCESSES_BESIDE_CALLS = """
import asyncio, octavo.gateway.main, grpc, uvloop

async def main():
    server = grpc.aio.server()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    calls = [asyncio.ensure_future(channel.unary_unary("/none/of/them")(b"")) for _ in range(200)]
    for _ in range(10):
        await (await asyncio.create_subprocess_exec("/bin/true")).wait()
    print({type(result).__name__ for result in await asyncio.gather(*calls, return_exceptions=True)})
    await channel.close()
    await server.stop(0)

uvloop.run(main())
"""


def test_starting_a_process_beside_calls_writes_nothing_of_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", STARTS_PROCESSES_BESIDE_CALLS], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "{'AioRpcError'}\n"
    assert "fork" not in ran.stderr
