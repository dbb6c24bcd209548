"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, RedisDsn, SecretStr, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from octavo.common.links.tls import check_ca, check_certificate
from octavo.common.service_config import AddressSetting, ServiceConfig, split_list
from octavo.gateway.routing import RoutingPolicy


class GatewayConfig(ServiceConfig):
    """The gateway's settings, from flags, `OCTAVO_GATEWAY_*` environment variables and a YAML file."""

    model_config = SettingsConfigDict(env_prefix="OCTAVO_GATEWAY_")

    model: Path
    """Folder with tokenizer.json and, for chat, tokenizer_config.json or chat_template.jinja."""

    scheduler: AddressSetting | None = None
    """Where the scheduler listens. Unset: there is one for each pool that the registry names."""

    routing: RoutingPolicy = "prefix"
    """Which of several groups gets a request. `prefix`: where it costs least, by what each pool holds and what waits
    there; `least_loaded`: where the fewest are; `round_robin`: in turn."""

    max_directory_blocks: int = Field(default=131_072, ge=0)
    """Blocks of one pool that routing by prefix remembers, about 100 bytes each."""

    reroute_after_s: float = Field(default=10.0, gt=0)
    """Seconds after which a request that has not begun goes to another group, if one has nothing waiting."""

    scheduler_admin: str | None = None
    """gRPC target (HOST:PORT or unix:PATH) of the scheduler's unary calls: /metrics shows its metrics as well. With a
    registry, schedulers tell theirs."""

    kvmanager_admin: str | None = None
    """gRPC target (HOST:PORT or unix:PATH) of the KV manager, whose pool the web page shows and tenants may flush. With
    a registry, KV managers tell theirs."""

    ui: bool = True
    """Serve the web page at /ui."""

    ui_update_interval_s: float = Field(default=0.25, ge=0.1, le=10)
    """Seconds between two updates of the web page's live view."""

    admin_key: SecretStr = SecretStr("")
    """Key that the live view asks for, as `Authorization: Bearer KEY`, where no API keys are asked for; else an
    operator's is needed. Without either it is shown only on this machine, and only if `host` is a loopback address."""

    host: str = "127.0.0.1"
    """Interface that HTTP is served on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port that HTTP is served on; 0 takes a free one."""

    reuse_port: bool = False
    """Listen beside other gateways on the same port; the kernel spreads connections over them."""

    tls_cert: Path | None = None
    """PEM file with the certificate for HTTPS, and those between it and the root; unset serves plain HTTP."""

    tls_key: Path | None = None
    """PEM file with its key."""

    tls_client_ca: Path | None = None
    """PEM file with the authorities of which clients must have a certificate; unset: they need none."""

    drain_delay_s: float = Field(default=0.0, ge=0)
    """Seconds after SIGTERM for which /health/ready fails while requests are still taken, so that a load balancer goes
    elsewhere before they are refused. Comes before `drain_grace_s`."""

    cors_origins: Annotated[list[str], NoDecode, BeforeValidator(split_list)] = Field(default=[])
    """Origins whose scripts may call this server, separated by commas; `*` for all."""

    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds for one attempt to reach the scheduler."""

    queue_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a request may wait for its first blocks before it fails with 503."""

    token_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds without any news of a started request before it fails with 503."""

    recovery_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for which running and new requests wait for a scheduler that was lost before they fail with 503."""

    max_open_requests: int = Field(default=8192, gt=0)
    """Prompts that this gateway has with the scheduler at once; more get 429."""

    max_body_bytes: int = Field(default=8 * 2**20, gt=0)
    """Size of a request's body; larger ones get 413."""

    max_buffered_body_bytes: int = Field(default=256 * 2**20, gt=0)
    """Bytes of all bodies whose answers have not begun; above it requests get 429."""

    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds in which a body must come; else the request gets 408."""

    stalled_client_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for which a client may take nothing of what is sent to it; then its connection is cut."""

    default_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds until a request without a `timeout` ends with 408; unset: no such end."""

    max_timeout_s: float = Field(default=86400.0, gt=0)
    """Longest `timeout` of a request."""

    max_prompts: int = Field(default=256, gt=0)
    """Prompts in one request."""

    max_n: int = Field(default=128, gt=0)
    """Choices for one prompt."""

    max_beam_width: int = Field(default=16, gt=0)
    """Beams of one beam search."""

    max_keep_s: float = Field(default=3600.0, ge=0)
    """Longest `keep` of a request."""

    max_choices: int = Field(default=1024, gt=0)
    """Prompts times choices in one request."""

    max_stop_strings: int = Field(default=16, gt=0)
    """Stop strings in one request."""

    max_stop_chars: int = Field(default=256, gt=0)
    """Length of one stop string."""

    max_stop_token_ids: int = Field(default=128, gt=0)
    """Stop token ids in one request."""

    max_grammar_bytes: int = Field(default=65536, gt=0)
    """Size of a schema, pattern or grammar for the output, as JSON."""

    grammar_timeout_s: float = Field(default=1.5, gt=0)
    """Seconds that compiling one may take before it is refused with 400."""

    grammar_processes: int = Field(default=2, gt=0)
    """Processes that compile them. They start when the first come."""

    max_bad_words: int = Field(default=128, gt=0)
    """`bad_words` in one request, each no longer than a stop string."""

    max_logit_bias: int = Field(default=1024, gt=0)
    """Tokens with a `logit_bias` in one request."""

    max_priority: int = Field(default=100, ge=0)
    """How far a request's `priority` may be from 0."""

    max_logprobs: int = Field(default=20, ge=0)
    """Most likely tokens that may be asked for beside each sampled one."""

    salt_secret: SecretStr = SecretStr("")
    """Enters the salt of every prefix block, so that nobody outside can build one. The same for all gateways."""

    api_keys: SecretStr | None = None
    """The keys and tenants themselves, as YAML or JSON. Unset, like the two below: no key is looked at."""

    api_keys_file: Path | None = None
    """YAML file with keys and tenants, as `octavo keys` writes it. A change is in force within 2 s."""

    api_keys_redis: RedisDsn | None = None
    """Redis URL where `octavo keys --redis` keeps them. A change is in force within 2 s."""

    limits_redis: RedisDsn | None = None
    """Redis URL where gateways count together what tenants use; unset: each counts for itself."""

    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = "auto"
    """How the model writes calls of tools. `auto` tells it from the chat template; with `none`, tools are refused."""

    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """How the model marks reasoning: `think` is `<think>...</think>`. `auto` tells it from the chat template."""

    max_tools: int = Field(default=128, gt=0)
    """Tools in one request."""

    response_ttl_s: float = Field(default=30 * 86400.0, gt=0)
    """Seconds for which a response of /v1/responses is stored."""

    response_store_bytes: int = Field(default=256 * 2**20, gt=0)
    """Bytes of stored responses in this gateway's memory; the oldest go first. In Redis, bytes of one response."""

    response_store_redis: RedisDsn | None = None
    """Redis URL where responses are stored, for several gateways; unset: in this gateway's memory."""

    tokenizer_threads: int = Field(default=2, gt=0)
    """Threads that encode long prompts."""

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        if sum(source is not None for source in (self.api_keys, self.api_keys_file, self.api_keys_redis)) > 1:
            raise ValueError("give one of api_keys, api_keys_file and api_keys_redis")
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_client_ca and not self.tls_cert):
            raise ValueError("tls_cert and tls_key go together, and tls_client_ca with them")
        if self.tls_cert is not None and self.tls_key is not None:
            check_certificate(self.tls_cert, self.tls_key)
        if self.tls_client_ca is not None:
            check_ca(self.tls_client_ca)
        if (self.scheduler is None) == (self.registry is None):
            raise ValueError("give either a scheduler or a registry to find schedulers in")
        return self
