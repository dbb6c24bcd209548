"""The worker groups that this gateway knows: one client for the scheduler of each, and who serves which request."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from octavo.common.codecs.arrays import pack_int32
from octavo.common.errors import LinkClosedError, NotReadyError, OctavoError, QueueFullError, UnknownResponseError
from octavo.common.links import Address, Link, TlsFiles
from octavo.common.messages.generation import GatewayMessage, ModelInfo, SchedulerMessage
from octavo.common.registry import Member, Roster
from octavo.common.roles import Role
from octavo.gateway import metrics
from octavo.gateway.generation import Generation
from octavo.gateway.pool_directory import PoolDirectory, PrefixMatcher
from octavo.gateway.pool_follower import PoolFollower
from octavo.gateway.request_part import Prompt
from octavo.gateway.routed_group import GroupState, RoutedGroup
from octavo.gateway.routing import Router, RoutingPolicy
from octavo.gateway.scheduler_client import Connect, SchedulerClient

log = structlog.get_logger()

_WATCH_INTERVAL_S = 1.0
_MAX_OWNERS = 65_536
"""Requests whose group is remembered, for branches and explanations."""


_LOST = "the scheduler that served it has been lost since, with all that it kept for branches: ask anew without one"


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How groups are used."""

    routing: RoutingPolicy = "prefix"
    max_directory_blocks: int = 131_072
    """Blocks of one pool that are remembered."""
    reroute_after_s: float = 10.0
    """A request that has not begun for so long goes to another group, if one has nothing waiting."""
    max_open_requests: int = 8192


class WorkerGroups:
    """Starts generations where they cost least, and moves those whose group cannot go on with them.

    Groups are those whose scheduler the roster names. Whether one is alive is for its link to say, so a group that the
    registry forgot goes on, and one that it still names takes nothing while its link is lost.
    """

    def __init__(
        self,
        roster: Roster,
        connect: Callable[[Member], Awaitable[Link[GatewayMessage, SchedulerMessage]]],
        make_client: Callable[[Connect], SchedulerClient],
        settings: GroupSettings = GroupSettings(),
        tls: TlsFiles | None = None,
    ) -> None:
        """`connect`: to a scheduler. `tls`: for the calls to KV managers."""
        self._roster = roster
        self._connect = connect
        self._make_client = make_client
        self._settings = settings
        self._tls = tls
        self._groups: dict[str, RoutedGroup] = {}
        self._router = Router(settings.routing)
        self._owners: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """By request: the pool of the scheduler that has it or had it, and its epoch."""
        self._farewell, self._refusal = "", ""
        self._is_changed = asyncio.Event()

    # What the routes look at.

    @property
    def model(self) -> ModelInfo | None:
        """The model that is served, with the longest sequences that a group takes; None until a scheduler has told."""
        models = [group.client.model for group in self._groups.values() if group.client.model is not None]
        if not models:
            return None
        served = next((group.client.model for group in self._usable() if group.client.model), models[0])
        alike = [model for model in models if model.model_name == served.model_name]
        return max(alike, key=lambda model: model.max_model_len)

    @property
    def why_not_ready(self) -> str:
        """Empty when a group is ready, else the reason, for people."""
        return self._farewell or self._common_reason({pool: g.client.why_not_ready for pool, g in self._groups.items()})

    @property
    def why_refused(self) -> str:
        """Empty when a request that comes now is served or may wait, else the reason, for people."""
        return self._refusal or self._common_reason({pool: g.client.why_refused for pool, g in self._groups.items()})

    @property
    def states(self) -> list[GroupState]:
        """Of all groups, by name."""
        return [group.state for _, group in sorted(self._groups.items())]

    def admin_target(self, role: Role, pool_id: str) -> str:
        """gRPC target of the unary calls of a group's scheduler or KV manager; empty while it is not known."""
        member = self._roster.latest(role, pool_id)
        return Address.parse(member.admin).grpc_target if member is not None and member.admin else ""

    def admin_targets(self, role: Role) -> dict[str, str]:
        """pool |-> the same, of all groups by name, where it is known"""
        return {pool_id: target for pool_id in sorted(self._groups) if (target := self.admin_target(role, pool_id))}

    @property
    def refuses_work(self) -> bool:
        """The gateway is about to end."""
        return bool(self._refusal)

    @property
    def num_open_requests(self) -> int:
        return sum(group.client.num_open_requests for group in self._groups.values())

    def _common_reason(self, reasons: dict[str, str]) -> str:
        if not reasons:
            return f"no scheduler is known yet{': ' if self._roster.away_reason else ''}{self._roster.away_reason}"
        if not all(reasons.values()):
            return ""
        if len(reasons) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{pool_id}: {reason}" for pool_id, reason in sorted(reasons.items()))

    # Requests.

    def submit(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        cache_salt: bytes = b"",
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> Generation:
        """Start a generation, see `SchedulerClient.submit`, in the group where it costs least.

        A branch goes to the group of its origin.
        """
        if reason := self.why_refused:
            raise NotReadyError(reason)
        if self.num_open_requests + len(prompts) > self._settings.max_open_requests:
            raise QueueFullError(f"this gateway already has {self.num_open_requests} requests open")
        group = self._owner_of_branch(prompts)
        if group is None:
            able = self._able(self._usable(), prompts)
            # Without a group that takes requests now, the request waits for the first one that may come back.
            waits_at = [group for group in self._groups.values() if not group.client.why_refused]
            group = self._choose(able or self._able(waits_at, prompts) or waits_at, prompts, cache_salt)
        generation = group.client.submit(request_id, prompts, cache_salt, timeout_s, traceparent)
        group.note(generation, prompts, cache_salt, is_only=len(self._groups) == 1)
        ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
        for part_id in {request_id, *ids}:
            self._own(part_id, group)
        return generation

    def forget(self, request_id: str, cache_salt: bytes) -> None:
        """Give up what a request keeps for branches. Raises NotReadyError."""
        owner = self._owner(request_id)
        groups = [owner] if owner is not None else list(self._groups.values())
        told, failure = False, NotReadyError(self.why_not_ready)
        for group in groups:
            try:
                group.client.forget(request_id, cache_salt)
                told = True
            except NotReadyError as error:
                failure = error
        if not told:
            raise failure

    async def explain(self, request_id: str, salt_head: bytes) -> bytes:
        """What happened to a request whose salt begins so, as JSON; empty if no scheduler knows it.

        Raises NotReadyError if none answers.
        """
        owner = self._owner(request_id)
        failure: NotReadyError | None = NotReadyError(self.why_not_ready)
        for group in sorted(self._groups.values(), key=lambda group: group is not owner):
            try:
                if explanation := await group.client.explain(request_id, salt_head):
                    return explanation
                failure = None
            except NotReadyError as error:
                failure = failure and error
        if failure is not None:
            raise failure
        return b""

    # The choice of a group.

    def _usable(self) -> list[RoutedGroup]:
        """Those that can begin with a request at once, by their links at this moment."""
        clients = ((group, group.client) for group in self._groups.values())
        return [group for group, client in clients if client.takes_requests and not client.why_not_ready]

    def _able(self, groups: list[RoutedGroup], prompts: Sequence[Prompt]) -> list[RoutedGroup]:
        """Of these, the ones with the served model and room for every prompt."""
        served = self.model
        longest = max(len(prompt.token_ids) + prompt.params.max_tokens for prompt in prompts)
        return [
            group
            for group in groups
            if (model := group.client.model) is not None
            and (served is None or model.model_name == served.model_name)
            and longest <= model.max_model_len
        ]

    def _choose(self, groups: list[RoutedGroup], prompts: Sequence[Prompt], cache_salt: bytes) -> RoutedGroup:
        if len(groups) == 1:
            return groups[0]
        prompt = prompts[0]
        matcher = PrefixMatcher(pack_int32(prompt.token_ids), cache_salt) if self._router.policy == "prefix" else None
        candidates = [
            (group.pool_id, group.candidate(matcher.num_matched_tokens(group.directory) if matcher else 0))
            for group in groups
        ]
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        chosen = self._router.choose(num_tokens, candidates)
        metrics.FORESEEN_CACHED_TOKENS.labels(chosen).inc(dict(candidates)[chosen].num_matched_tokens)
        return self._groups[chosen]

    def _owner_of_branch(self, prompts: Sequence[Prompt]) -> RoutedGroup | None:
        branch = prompts[0].branch
        if branch is None:
            return None
        return self._owner(branch.request_id)

    def _owner(self, request_id: str) -> RoutedGroup | None:
        pool_id, _ = self._owners.get(request_id, (None, 0))
        return self._groups.get(pool_id) if pool_id is not None else None

    def _own(self, request_id: str, group: RoutedGroup) -> None:
        self._owners[request_id] = (group.pool_id, group.client.epoch)
        self._owners.move_to_end(request_id)
        if len(self._owners) > _MAX_OWNERS:
            self._owners.popitem(last=False)

    # Moving.

    def _move_stranded(self) -> None:
        """Requests of groups that are lost, or whose worker is, go on in others."""
        for group in list(self._groups.values()):
            for generation in group.client.stranded:
                self._move(group, generation, "group lost")

    def _move_overdue(self) -> None:
        """Requests that wait for long while another group has nothing waiting."""
        now_s = asyncio.get_running_loop().time()
        for group in list(self._groups.values()):
            is_busy = group.num_waiting_tokens > 0
            for generation in list(group.waiting) if is_busy else ():
                idle = [other for other in self._usable() if other.is_idle]
                if now_s - generation.last_news_s > self._settings.reroute_after_s and idle:
                    self._move(group, generation, "not begun in time", idle)

    def _on_failed(self, group: RoutedGroup, generation: Generation, error: OctavoError) -> bool:
        """A scheduler refused a request. True if another one has it now."""
        is_elsewhere = isinstance(error, UnknownResponseError) and generation.is_branch
        if not (is_elsewhere or isinstance(error, (QueueFullError, NotReadyError))):
            return False
        generation.refused_by.add(group.pool_id)
        if self._move(group, generation, "refused", can_branch=is_elsewhere):
            return True
        if is_elsewhere and self._was_lost(generation):
            generation.fail(UnknownResponseError(f"{error.message}; {_LOST}"))
        return False

    def _was_lost(self, branch: Generation) -> bool:
        """The scheduler that served the origin is not the one that its group has now."""
        point = branch.parts[0].prompt.branch
        owner = self._owners.get(point.request_id) if point is not None else None
        if owner is None:
            return False
        pool_id, epoch = owner
        group = self._groups.get(pool_id)
        return group is None or group.client.epoch != epoch

    def _move(
        self,
        group: RoutedGroup,
        generation: Generation,
        why: str,
        among: list[RoutedGroup] | None = None,
        *,
        can_branch: bool = False,
    ) -> bool:
        """To the best of `among`, or of all. True if this group has it no more."""
        if generation.is_branch and not can_branch:
            return False  # what it branches from is nowhere else
        prompts = [part.prompt for part in generation.parts]
        cache_salt = generation.parts[0].cache_salt
        others = [
            other
            for other in self._able(self._usable() if among is None else among, prompts)
            if other is not group and other.pool_id not in generation.refused_by
        ]
        if not others:
            return False
        chosen = self._choose(others, prompts, cache_salt)
        if not group.client.release(generation):
            return True  # it has failed: it was lost too often
        ids = [part.request_id for part in generation.parts]
        log.info("request moved", request_id=ids[0], why=why, origin=group.pool_id, to=chosen.pool_id)
        metrics.MOVED_REQUESTS.labels(why).inc()
        chosen.client.adopt(generation)
        chosen.note(generation, prompts, cache_salt, is_only=False)
        for part_id in ids:
            self._own(part_id, chosen)
        return True

    # The life of the groups.

    async def run(self) -> None:
        """Keep a client for every group until cancelled."""
        self._roster.on_change = self._is_changed.set
        refreshing = asyncio.create_task(self._roster.run())
        try:
            while True:
                self._is_changed.clear()
                self._follow_roster()
                self._move_stranded()
                self._move_overdue()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_INTERVAL_S):
                        await self._is_changed.wait()
        finally:
            tasks = [refreshing, *(task for group in self._groups.values() for task in group.tasks)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _follow_roster(self) -> None:
        named = {member.pool_id for member in self._roster.members if member.role is Role.SCHEDULER}
        for pool_id in sorted(named - self._groups.keys()):
            self._groups[pool_id] = self._new_group(pool_id)
            log.info("group found", pool_id=pool_id)
        for pool_id in self._groups.keys() - named:
            group = self._groups[pool_id]
            if not group.client.is_connected and not group.client.num_open_requests:
                log.info("group gone", pool_id=pool_id)
                for task in group.tasks:
                    task.cancel()
                del self._groups[pool_id]
                self._router.forget(pool_id)

    def _new_group(self, pool_id: str) -> RoutedGroup:
        async def connect() -> Link[GatewayMessage, SchedulerMessage]:
            member = self._roster.latest(Role.SCHEDULER, pool_id)
            if member is None:
                raise LinkClosedError(f"no scheduler of pool {pool_id!r} is registered")
            return await self._connect(member)

        def kvmanager_target() -> str:
            """Nobody asks what the only pool holds."""
            return self.admin_target(Role.KVMANAGER, pool_id) if len(self._groups) > 1 else ""

        client = self._make_client(connect)
        directory = PoolDirectory(self._settings.max_directory_blocks)
        group = RoutedGroup(pool_id, client, directory)
        client.on_change = self._is_changed.set
        client.on_failed = lambda generation, error: self._on_failed(group, generation, error)
        if self._refusal:
            client.refuse_new_work(self._refusal)
        group.tasks = [asyncio.create_task(client.run())]
        if self._router.policy == "prefix":
            follower = PoolFollower(pool_id, kvmanager_target, directory, self._tls)
            group.tasks.append(asyncio.create_task(follower.run()))
        return group

    def say_farewell(self, reason: str) -> None:
        """Not ready from here on; what comes is still taken."""
        self._farewell = reason

    def refuse_new_work(self, reason: str) -> None:
        """Not ready from here on; what runs goes on."""
        self._farewell = self._refusal = reason
        for group in self._groups.values():
            group.client.refuse_new_work(reason)

    async def drain(self, grace_s: float) -> None:
        """Return when nothing runs; what still does after `grace_s` fails with NotReadyError."""
        await asyncio.gather(*(group.client.drain(grace_s) for group in self._groups.values()))
