"""A KV manager and a scheduler to look at: the real servicer over a driven pool, and a scheduler that plays along."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import grpc
import orjson

from octavo.common.codecs.arrays import pack_float64, pack_int32, pack_int64
from octavo.common.links import Address
from octavo.common.messages.kv import Admission, Arrival, KvReply, KvRequest, OpenPool, Publication, Release, Verdict
from octavo.common.registry import Member
from octavo.common.roles import Role
from octavo.kvmanager.pool import Pool, PoolSettings
from octavo.kvmanager.servicer import KvManagerServicer
from octavo.kvmanager.stats import KvStats
from octavo.v1 import scheduler_service_pb2 as pb

BLOCK_SIZE = 16
NUM_SYSTEM_PROMPTS = 12
STEP_S = 0.012
STEPS_BEHIND = 6
"""Messages between a release and the acknowledgement of its fence."""
CAUSES = ["", "behind_others", "no_slot", "no_blocks", "in_flight_prefix"]


@dataclass
class LivelyPool:
    """A pool under a made-up load: sequences that share system prompts, grow, end and come."""

    num_blocks: int
    num_sequences: int
    prompt_blocks: int
    shared_blocks: int
    seed: int = 7
    pool_id: str = "default"
    lengths: dict[int, int] = field(default_factory=dict)
    """Live sequence |-> tokens of its prompt."""

    def __post_init__(self) -> None:
        opening = OpenPool(self.pool_id, 1, 1, self.num_blocks, BLOCK_SIZE, self.num_blocks // 4)
        self.pool = Pool(opening, PoolSettings(), KvStats())
        self.pool.blocks.events.life = 0x5EED
        self._rng = random.Random(self.seed)
        self._message_no = 0
        self._next_id = 1
        while len(self.lengths) < self.num_sequences and self.admit():
            pass

    # What a servicer asks of its server.

    hash_algorithm: ClassVar[str] = "sha256"

    @property
    def pools(self) -> list[Pool]:
        return [self.pool]

    def find_pool(self, pool_id: str) -> Pool | None:
        return self.pool if pool_id in ("", self.pool_id) else None

    def send(self, **fields: Any) -> KvReply:
        self._message_no += 1
        acknowledged_step = max(0, self._message_no - STEPS_BEHIND)
        return self.pool.apply(KvRequest(self._message_no, acknowledged_step, **{"credit_target": 24, **fields}))

    def admit(self) -> bool:
        """One sequence more, if there is room."""
        sequence_id, rng = self._next_id, self._rng
        group = min(int(rng.expovariate(0.35)), NUM_SYSTEM_PROMPTS - 1)
        num_own = int(rng.uniform(0.4, 1.4) * (self.prompt_blocks - self.shared_blocks))
        own = [rng.randrange(30_000) for _ in range(num_own * BLOCK_SIZE + rng.randrange(BLOCK_SIZE))]
        prompt = array("i", [*range(1000 * group, 1000 * group + self.shared_blocks * BLOCK_SIZE), *own])
        self.send(arrivals=[Arrival(sequence_id, prompt)])
        while self.pool.hash_slice():
            pass
        [admitted] = self.send(admissions=[Admission(sequence_id, computes_itself=True)]).admitted
        if admitted.verdict is not Verdict.OK:
            self.send(releases=[Release(sequence_id, 0)])
            return False
        self.send(publications=[Publication(sequence_id, len(prompt), ())])
        self.lengths[sequence_id] = len(prompt)
        self._next_id += 1
        return True

    def grow(self, sequence_id: int) -> int:
        """It takes one block more, which is returned."""
        block_id = min(self.pool.blocks.granted)
        self.send(spent=[(sequence_id, block_id)])
        return block_id

    def end(self, sequence_id: int) -> None:
        del self.lengths[sequence_id]
        self.send(releases=[Release(sequence_id, self._message_no)])

    def tick(self) -> None:
        """A little later: some have grown, one or two have ended, and others have come."""
        growing = self._rng.sample(sorted(self.lengths), min(24, len(self.lengths)))
        self.send(spent=[(one, block) for one, block in zip(growing, sorted(self.pool.blocks.granted), strict=False)])
        for ended in self._rng.sample(sorted(self.lengths), min(2, len(self.lengths))):
            self.end(ended)
        while len(self.lengths) < self.num_sequences and self.admit():
            pass


class LivelyScheduler:
    """Tells of the pool's sequences, of steps of even length, and of requests that ended."""

    def __init__(self, pool: LivelyPool) -> None:
        self.pool = pool
        self._rng = random.Random(1)
        self.explanations: dict[str, dict[str, Any]] = {}

    async def WatchActivity(self, request: pb.WatchActivityRequest, context: Any) -> AsyncIterator[pb.ActivityFrame]:
        named: set[int] = set()
        last_s, step_id, num_output = time.monotonic() - 8, 1, 0
        while True:
            now = time.monotonic()
            frame = self._frame(now, named)
            num_steps = int((now - last_s) / STEP_S)
            self._add_steps(frame, step_id, num_steps, last_s)
            num_output += num_steps * frame.num_running
            frame.num_output_tokens = num_output
            self._add_ended(frame, last_s, now)
            last_s, step_id = last_s + num_steps * STEP_S, step_id + num_steps
            yield frame
            await asyncio.sleep(request.interval_ms / 1000)

    async def ExplainRequest(self, request: pb.ExplainRequestRequest, context: Any) -> pb.ExplainRequestResponse:
        if request.request_id not in self.explanations:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown")
        return pb.ExplainRequestResponse(explanation=orjson.dumps(self.explanations[request.request_id]))

    def _frame(self, now: float, named: set[int]) -> pb.ActivityFrame:
        tables = dict(self.pool.pool.tables)
        running = sorted(self.pool.lengths)
        waiting = list(range(10**6, 10**6 + 9))
        tokens = [len(tables[one].block_ids) * BLOCK_SIZE for one in running] + [700] * len(waiting)
        frame = pb.ActivityFrame(
            now_s=now,
            num_waiting=len(waiting),
            num_parked=2,
            num_running=len(running),
            max_num_running=512,
            sequence_ids=pack_int64([*running, *waiting]),
            states=bytes([2] * len(running) + [1] * len(waiting)),
            num_tokens=pack_int32(tokens),
            num_prompt_tokens=pack_int32([*self.pool.lengths.values(), *[700] * len(waiting)]),
            num_computed_tokens=pack_int32([*tokens[: len(running)], *[0] * len(waiting)]),
            waits_for=bytes([0] * len(running) + [1, 1, 1, 1, 1, 1, 3, 4, 4]),
            wait_causes=CAUSES,
        )
        for sequence_id in {*running, *waiting} - named:
            frame.names.add(sequence_id=sequence_id, request_id=request_id_of(sequence_id))
        named.update(running, waiting)
        return frame

    def _add_steps(self, frame: pb.ActivityFrame, first_id: int, number: int, since: float) -> None:
        ends = [since + (place + 1) * STEP_S for place in range(number)]
        prefill = [self._rng.choice((0, 0, 0, 0, 512)) for _ in ends]
        rows = [frame.num_running - self._rng.randrange(max(1, frame.num_running // 4)) for _ in ends]
        idle = [900 if self._rng.random() < 0.02 else 15 for _ in ends]
        frame.step_ids = pack_int64(range(first_id, first_id + number))
        frame.step_launched_s = pack_float64([end - 2 * STEP_S for end in ends])
        frame.step_ended_s = pack_float64(ends)
        frame.step_compute_us = pack_int32([round(1e6 * STEP_S) - 300 - one for one in idle])
        frame.step_idle_us = pack_int32(idle)
        frame.step_rows = pack_int32(rows)
        frame.step_tokens = pack_int32([row + one for row, one in zip(rows, prefill, strict=True)])
        frame.step_prefill_tokens = pack_int32(prefill)
        if ends and self._rng.random() < 0.3:
            frame.stalls.add(began_s=ends[-1] - 0.02, ended_s=ends[-1], cause="credits")

    def _add_ended(self, frame: pb.ActivityFrame, since: float, now: float) -> None:
        for _ in range(min(40, int((now - since) * 12))):
            at = self._rng.uniform(since, now)
            ttft, tpot, number = self._rng.lognormvariate(-1.2, 0.5), self._rng.lognormvariate(-4.1, 0.2), 180
            frame.ended.add(
                request_id=request_id_of(1),
                ended_s=at,
                ttft_s=ttft,
                decode_s=tpot * (number - 1),
                num_output_tokens=number,
                num_choices=1,
            )

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            "WatchActivity": grpc.unary_stream_rpc_method_handler(
                self.WatchActivity,
                request_deserializer=pb.WatchActivityRequest.FromString,
                response_serializer=pb.ActivityFrame.SerializeToString,
            ),
            "ExplainRequest": grpc.unary_unary_rpc_method_handler(
                self.ExplainRequest,
                request_deserializer=pb.ExplainRequestRequest.FromString,
                response_serializer=pb.ExplainRequestResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("octavo.v1.SchedulerService", handlers),))


def request_id_of(sequence_id: int) -> str:
    return f"{sequence_id * 2654435761 % 2**32:08x}5d0f4c1b9a7e{sequence_id:08d}"


@dataclass
class LivelyServices:
    """Both, listening at gRPC targets."""

    pool: LivelyPool
    scheduler: LivelyScheduler
    kvmanager: KvManagerServicer
    targets: dict[str, str]
    """As settings of the gateway."""


@contextlib.asynccontextmanager
async def lively_services(folder: Path, pool: LivelyPool, tick_s: float = 0.1) -> AsyncIterator[LivelyServices]:
    """`tick_s`: seconds between two changes of the pool."""
    scheduler = LivelyScheduler(pool)
    kvmanager = KvManagerServicer(cast(Any, pool))
    servers = {"kvmanager": kvmanager, "scheduler": scheduler}
    started, targets = [], {}
    for name, servicer in servers.items():
        server = grpc.aio.server()
        servicer.add_to(server)
        targets[f"{name}_admin"] = f"unix:{folder / name}.sock"
        server.add_insecure_port(targets[f"{name}_admin"])
        await server.start()
        started.append(server)

    async def live() -> None:
        while True:
            pool.tick()
            await asyncio.sleep(tick_s)

    living = asyncio.create_task(live())
    try:
        yield LivelyServices(pool, scheduler, kvmanager, targets)
    finally:
        living.cancel()
        for server in started:
            await server.stop(0.1)


@contextlib.asynccontextmanager
async def lively_groups(
    folder: Path, pools: Sequence[LivelyPool], tick_s: float = 0.1
) -> AsyncIterator[tuple[dict[str, LivelyServices], str]]:
    """Services of several pools, and the address of a registry that names them."""
    async with contextlib.AsyncExitStack() as stack:
        groups, members = {}, []
        for pool in pools:
            (folder / pool.pool_id).mkdir()
            services = lively_services(folder / pool.pool_id, pool, tick_s)
            groups[pool.pool_id] = await stack.enter_async_context(services)
            for role in (Role.SCHEDULER, Role.KVMANAGER):
                address = str(Address.of_grpc_target(groups[pool.pool_id].targets[f"{role}_admin"]))
                members.append(asdict(Member(f"{role}-{pool.pool_id}", role, pool.pool_id, address, address)))
        (folder / "members.json").write_bytes(orjson.dumps(members))
        yield groups, f"file://{folder}/members.json"
