# `make demo` runs the main job, `make test` the tests; each target sets up what it needs.
SHELL := /bin/bash
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
DEBIAN_LIBS := $(CURDIR)/$(VENV)/lib-debian
export LD_LIBRARY_PATH := $(DEBIAN_LIBS)$(addprefix :,$(LD_LIBRARY_PATH))
PYTHON ?= python3
STAMP := $(VENV)/.ready

.PHONY: setup demo test triton gpu check bench mutations soak soak-faults soak-overload stubs clean

setup: $(STAMP)

# torch comes with plain pip, which finds a local CPU build where there is one; uv installs the rest in seconds, with
# bytecode: each Ray process would compile it again otherwise.
$(STAMP): pyproject.toml constraints.txt deploy/mooncake_libs.sh
	@command -v g++ >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -y -qq --no-install-recommends g++; } \
	  || { echo "g++ is missing, the CPU kernels are compiled with it: apt-get install g++"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	$(VENV)/bin/uv pip install --quiet --compile-bytecode -c constraints.txt -e '.[dev,mooncake]'
	deploy/mooncake_libs.sh $(VENV)/bin/python $(DEBIAN_LIBS)
	touch $(STAMP)

demo: setup
	tidemill demo

# Two processes: what starts servers mostly waits. The tests of a file share its servers, so they stay together.
test: setup triton
	python -m pytest -n 2 --dist loadfile

# Triton's kernels in its interpreter, which it decides on when it is first imported.
triton: setup
	TRITON_INTERPRET=1 python -m pytest -n 2 tests/triton

# On a machine with a CUDA toolkit, after: uv pip install --no-build-isolation -e '.[gpu]'
gpu: setup
	python -m pytest tests/gpu

check: setup
	ruff check .
	ruff format --check .
	pyright
	python -m pytest tests/tidy

bench: setup
	python -m benchmarks.all

mutations: setup
	python -m tests.mutations

soak: setup
	SIM_RUNS=20000 python -m pytest tests/sim

soak-faults: setup
	FAULT_RUNS=50 python -m pytest tests/e2e/test_faults.py -s -k storm
	FAULT_RUNS=50 FAULT_RANKS=2 python -m pytest tests/e2e/test_faults.py -s -k storm

soak-overload: setup
	FLOOD_S=60 python -m pytest tests/e2e/test_overload.py -s

stubs: setup
	python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src tidemill/cluster/proto/tidemill.proto

clean:
	rm -rf $(VENV) build dist src/*.egg-info
