"""What is known of a request beside its answer: whose it is, and what it has used."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from starlette.types import Scope

from octavo.gateway import metrics
from octavo.gateway.api_keys import Tenant
from octavo.gateway.http_errors import RefusedError, report
from octavo.gateway.rate_limits import Lease, Limiter, Standing
from octavo.gateway.request_part import Prompt

ANONYMOUS = ""
"""The tenant of all requests where there are no keys."""


@dataclass(slots=True)
class RequestAccount:
    """One per HTTP request, in its state as `account`."""

    tenant_name: str = ANONYMOUS
    tenant: Tenant = field(default_factory=Tenant)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float | None = None
    traceparent: str = ""
    """Context for spans of it; empty if it is not traced."""
    standing: Standing | None = None
    """After the last call of the limiter; None where the tenant has no limits."""
    _limiter: Limiter | None = None
    _lease: Lease | None = None

    def own(self, prompt: Prompt) -> Prompt:
        """The prompt as the tenant's: with keys, a client can only step back from the tenant's priority."""
        if self.tenant_name == ANONYMOUS:
            return prompt
        priority = self.tenant.priority + max(0, prompt.priority)
        return replace(prompt, priority=priority, tenant=self.tenant_name, weight=self.tenant.weight)

    async def enter(self, limiter: Limiter) -> None:
        """Count the request. Raises RefusedError if the tenant's limits do not let it in."""
        lease = Lease(self.tenant_name, self.tenant)
        self._check(await limiter.enter(lease), 1)
        self._limiter, self._lease = limiter, lease

    async def charge_prompt(self, num_tokens: int) -> None:
        """Take a prompt's tokens from the tenant's. Raises RefusedError if there are too few."""
        if self._limiter is not None and self._lease is not None:
            self._check(await self._limiter.charge(self._lease, num_tokens), num_tokens)
        self.num_prompt_tokens = num_tokens

    async def leave(self) -> None:
        """The request has ended, whichever way."""
        if self._limiter is not None and self._lease is not None:
            await self._limiter.leave(self._lease, self.num_output_tokens)

    def _check(self, standing: Standing, num_tokens: int) -> None:
        self.standing = standing
        if standing.refused_by is not None:
            metrics.RATE_LIMITED.labels(standing.refused_by).inc()
            raise _refusal(self.tenant, standing, num_tokens)


def account_of(scope: Scope) -> RequestAccount:
    """That of a request; a fresh one if it has none yet."""
    account: RequestAccount = scope.setdefault("state", {}).setdefault("account", RequestAccount())
    return account


def _refusal(tenant: Tenant, standing: Standing, num_tokens: int) -> RefusedError:
    """Type and code are those of OpenAI's API. Clients know the headers."""
    wait_s, headers = standing.retry_after_s, {"x-should-retry": "false"}
    if math.isinf(wait_s):
        message = (
            f"the prompt of {num_tokens} tokens is above the limit of {tenant.tokens_per_minute} tokens per minute"
        )
    else:
        what = {
            "concurrent_requests": f"{tenant.max_concurrent} requests are open, as many as may be",
            "requests": f"the limit of {tenant.requests_per_minute} requests per minute is reached",
            "tokens": f"{num_tokens} tokens are above what is left of {tenant.tokens_per_minute} tokens per minute",
        }[str(standing.refused_by)]
        message = f"Rate limit reached: {what}. Please try again in {wait_s:.3f}s."
        headers = {
            "retry-after": str(max(1, math.ceil(wait_s))),
            "retry-after-ms": str(max(1, math.ceil(wait_s * 1000))),
        }
    return RefusedError(report(429, message, str(standing.refused_by), None, "rate_limit_exceeded", headers))
