"""Build an engine that a vLLM server runs: the Build and the Check of workers/contract/engine.py."""

import logging
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, get_args

import httpx

from tidemill.workers.contract.engine import Progress
from tidemill.workers.messages import EngineInfo, Role
from tidemill.workers.models.model_files import eos_ids_of, read_json
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.settings import HostedSettings, SettingsError
from tidemill.workers.sources.download import download
from tidemill.workers.vllm.client import VllmClient
from tidemill.workers.vllm.engine import VllmEngine
from tidemill.workers.vllm.metrics import Metrics
from tidemill.workers.vllm.prefixes import Prefixes
from tidemill.workers.vllm.server_process import EngineEnded, ServerProcess
from tidemill.workers.vllm.settings import VERSION_MIN, VllmSettings, command_of, environ_of

if TYPE_CHECKING:  # needs the extra `events`
    from tidemill.workers.vllm.events import Subscription

READY_S = 0.2
"""The period in which a server that starts is asked whether it is ready."""

ANSWER_S_MAX = 60.0
"""The time limit of a question to a server that is ready, and to the Python of an environment."""

FIND = (
    "from importlib.metadata import version; from importlib.util import find_spec;"
    "print(version('vllm'), any(map(find_spec, ('nixl', 'nixl_rocm'))))"
)

CANNOT_CONTINUE = ("grammar", "penalties", "seed")
"""vLLM starts grammars, the counts of penalties and random generators at the end of the prompt, which has the
tokens of a lost stream."""

LACKS = ("bad_words", "grammar_alternatives", "pooling", "prompt_logprobs")
"""vLLM tokenizes bad words itself, follows one grammar, and streams no logprobs of the prompt."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltVllm:
    engine: VllmEngine
    info: EngineInfo
    group: ServerProcess | None  # None: others run the server


def check_vllm(settings: HostedSettings, *, here: bool = False) -> None:
    """Raise SettingsError if no server can be started here, or its events not be received."""
    made = _of_vllm(settings)
    try:
        resolve_name("tidemill.workers.vllm.events")
    except ImportError as error:
        raise SettingsError(f"--engine vllm needs pyzmq ({error}): pip install 'tidemill[events]'") from None
    if here and not made.urls:
        version, has_nixl = _found(made)
        if tuple(map(int, version.split(".")[:2])) < VERSION_MIN:
            least = ".".join(map(str, VERSION_MIN))
            raise SettingsError(f"{made.python} has vLLM {version}, and {least} is the oldest that works")
        if made.transfers and has_nixl != "True":
            raise SettingsError(f"--prefill and --decode need NIXL: {made.python} -m pip install nixl")


def build_vllm(
    settings: HostedSettings,
    progress: Progress,  # noqa: ARG001 - vLLM reports none
    start_ranks: StartRanks | None = None,  # noqa: ARG001 - vLLM starts its own
) -> BuiltVllm:
    """Start a server, or join one, and wait until it is ready. Raises SettingsError, EngineEnded,
    ModelError and OSError, each with one line that names the fix."""
    made = _of_vllm(settings)
    check_vllm(made)
    if made.model_source is not None and not made.model_folder.exists():
        made = replace(made, model_folder=download(made.model_source))
    return _joined(made) if made.url else _started(made)


def _of_vllm(settings: HostedSettings) -> VllmSettings:
    assert isinstance(settings, VllmSettings)
    return settings


def _found(settings: VllmSettings) -> list[str]:
    """Return the version of vLLM, and whether there is NIXL."""
    try:
        found = subprocess.run(  # noqa: S603 - of the configuration
            [settings.python, "-I", "-c", FIND],
            capture_output=True,
            text=True,
            timeout=ANSWER_S_MAX,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingsError(
            f"--engine-python {settings.python} has no vLLM ({error}): set it to the python of an environment"
            " that has it"
        ) from None
    return found.stdout.split()


def _started(settings: VllmSettings) -> BuiltVllm:
    from tidemill.workers.vllm.events import Subscription  # noqa: PLC0415 - an extra

    api_key, port = secrets.token_hex(32), _free_port()
    events = Subscription()
    environ = environ_of(settings, api_key, _free_port(settings.host))
    server = ServerProcess(command_of(settings, port, events.port), environ)
    try:
        ask = _Questions(f"http://127.0.0.1:{port}", api_key)
        while not ask.is_ready():
            server.check()
            time.sleep(READY_S)
        return _built(settings, ask, events, server)
    except BaseException:
        server.stop()
        events.close()
        raise


def _joined(settings: VllmSettings) -> BuiltVllm:
    """Join the server at the URL of this worker. Raises EngineEnded."""
    from tidemill.workers.vllm.events import Subscription  # noqa: PLC0415 - an extra

    ask = _Questions(settings.url)
    if not ask.is_ready():
        raise EngineEnded(f"no vLLM is ready at {settings.url}: start it, or leave its URL out of --engine")
    sources: dict[str, Any] = ask.json("/kv_event_sources")
    addresses = [str(source["endpoint"]) for source in sources.values()]
    events = None
    if len(addresses) == 1 and "*" in addresses[0]:  # vLLM connects to an address without *
        events = Subscription(addresses[0].replace("*", httpx.URL(settings.url).host))
    else:
        known = ", ".join(addresses) or "none"
        fix = f"--kv-events-config with an endpoint like tcp://*:5557 (it has {known}), and one engine"
        log.warning("%s announces nothing: it needs %s", settings.url, fix)
    return _built(settings, ask, events, None)


def _built(
    settings: VllmSettings,
    ask: "_Questions",
    events: "Subscription | None",
    server: ServerProcess | None,
) -> BuiltVllm:
    metrics = ask.metrics()
    info = _info(settings, metrics, ask.max_model_len())
    prefixes = Prefixes(info.fingerprint, info.layout, info.page_tokens, keeps_states=metrics.keeps_states)
    client = VllmClient(ask.url, ask.api_key)
    engine = VllmEngine(
        client,
        info,
        metrics,
        prefixes,
        events,
        prioritizes=ask.generates(),
        wedged_s_max=settings.wedged_s_max,
    )
    return BuiltVllm(engine, info, server)


def _info(settings: VllmSettings, metrics: Metrics, max_model_len: int) -> EngineInfo:
    """Return the facts of a server. Raises ModelError."""
    config = read_json(settings.model_folder / "config.json")
    text: Mapping[str, Any] = config | (config.get("text_config") or {})
    return EngineInfo(
        isolates=False,
        publishes=False,
        inexact_with=CANNOT_CONTINUE,
        refuses=LACKS,
        roles=get_args(Role) if settings.transfers else ("mixed",),
        tensor_parallel_size=settings.ranks,
        fingerprint=blake2b(repr(sorted(config.items())).encode(), digest_size=16).hexdigest(),
        layout=f"vllm/{metrics.page_tokens}",
        page_tokens=metrics.page_tokens,
        page_bytes=metrics.memory_bytes // max(1, metrics.num_pages),
        max_model_len=max_model_len,
        vocab_size=int(text["vocab_size"]),
        eos_token_ids=tuple(sorted(eos_ids_of(settings.model_folder, config))),
        device=settings.url or settings.device,
        memory_bytes=metrics.memory_bytes,
        memory_floor_bytes=metrics.memory_bytes,
        memory_max_bytes=metrics.memory_bytes,
    )


class _Questions:
    """The questions to a server before it serves."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def is_ready(self) -> bool:
        try:
            return self._call("GET", "/health").is_success
        except httpx.HTTPError:
            return False

    def json(self, path: str) -> Any:  # noqa: ANN401 - JSON
        return self._checked("GET", path).json()

    def metrics(self) -> Metrics:
        return Metrics.parse(self._checked("GET", "/metrics").content)

    def max_model_len(self) -> int:
        return int(self.json("/v1/models")["data"][0]["max_model_len"])

    def generates(self) -> bool:
        """Draw a token, and return whether the server knows priorities. Raises EngineEnded."""
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
        path = "/inference/v1/generate"
        if self._call("POST", path, json={**body, "priority": 1}).is_success:
            return True
        self._checked("POST", path, json=body)
        return False

    def _checked(self, method: str, path: str, **given: Any) -> httpx.Response:  # noqa: ANN401 - of httpx
        try:
            answer = self._call(method, path, **given)
        except httpx.HTTPError as error:
            raise EngineEnded(f"vLLM at {self.url} does not answer {path}: {error!r}") from error
        if not answer.is_success:
            text = " ".join(answer.text.split())[:300]
            raise EngineEnded(f"vLLM at {self.url} answers {path} with {answer.status_code}: {text}")
        return answer

    def _call(self, method: str, path: str, **given: Any) -> httpx.Response:  # noqa: ANN401 - of httpx
        return httpx.request(
            method, self.url + path, headers=self._headers, timeout=ANSWER_S_MAX, trust_env=False, **given
        )


def _free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now; a server that finds it taken ends, and is started again."""
    with socket.create_server((host, 0)) as probe:
        return probe.getsockname()[1]
