# `make demo` runs the main job, `make test` the tests; each target sets up what it needs. CONTRIBUTING.md explains all.
SHELL := /bin/bash
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
DEBIAN_LIBS := $(CURDIR)/$(VENV)/lib-debian
export LD_LIBRARY_PATH := $(DEBIAN_LIBS)$(addprefix :,$(LD_LIBRARY_PATH))
PYTHON ?= python3
STAMP := $(VENV)/.ready

.PHONY: setup demo test test-all browser triton triton-3.6 nodes gpu check bench clients fuzz mutations soak soak-faults soak-nodes soak-overload stubs metrics-doc config-doc helm-golden wheel sbom clean

setup: $(STAMP)

# torch comes with plain pip, which finds a local CPU build where there is one; uv installs the rest in seconds, with
# bytecode: each Ray process would compile it again otherwise.
$(STAMP): pyproject.toml setup.py constraints.txt deploy/mooncake_libs.sh
	@command -v g++ >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && { apt-get update -qq; apt-get install -y -qq --no-install-recommends g++; }; } \
	  || { echo "g++ is missing, the CPU kernels are compiled with it: apt-get install g++, as root"; exit 1; }
	@test -x $(VENV)/bin/pip || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } \
	  || { echo "no virtual environment: apt-get install python3-venv, as root, or PYTHON=python of 3.11 or newer"; exit 1; }
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	$(VENV)/bin/uv pip install --quiet --compile-bytecode -c constraints.txt -e '.[dev,mooncake]'
	deploy/mooncake_libs.sh $(VENV)/bin/python $(DEBIAN_LIBS)
	touch $(STAMP)

demo: setup
	tidemill demo

# Threads of one process would wait for those of the other, and burn a core meanwhile.
test test-all triton triton-3.6 mutations: export OMP_NUM_THREADS := 1
# Bytecode, also where the environment forbids it: each of the hundred processes would compile all modules again.
test test-all triton triton-3.6 mutations: export PYTHONDONTWRITEBYTECODE :=

# Two processes, because servers would wait for each other with three. The tests of a file share its servers, so one
# process runs them all. In the order of folders, so that tests/e2e, which takes longest, does not come last.
SUITE := python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/tidy --ignore tests/e2e/test_nodes.py

test: setup
	$(SUITE) -m "not slow"

test-all: setup triton triton-3.6
	$(SUITE)
	python -m tests.mutations

# A Ray cluster of three nodes on this machine, which takes minutes and wants it for itself.
nodes: setup
	python -m pytest tests/e2e/test_nodes.py

# Triton's kernels in its interpreter, which it decides on when it is first imported.
triton: setup
	TRITON_INTERPRET=1 python -m pytest -n 2 tests/triton

# The same with the Triton that torch 2.11 wants, whose interpreter needs an older numpy; beside the venv's own.
TRITON_3_6 := $(CURDIR)/$(VENV)/triton-3.6
triton-3.6: setup
	test -d $(TRITON_3_6)/numpy || uv pip install --quiet --target $(TRITON_3_6) triton==3.6.0 'numpy<2.4'
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON_3_6) python -m pytest -n 2 tests/triton \
	  -W 'ignore:Conversion of an array:DeprecationWarning'
	PYTHONPATH=$(TRITON_3_6) python -m pytest -n 2 tests/unit/kernels/test_sm90.py

# On a machine with a CUDA toolkit, after: uv pip install --no-build-isolation -e '.[gpu]'
# Operators are hundreds of kernels to compile, by many processes; what looks at the memory of the device is alone.
GPU_OPERATORS := tests/gpu/test_operators.py tests/gpu/test_page_copy.py
gpu: setup
	python -m pytest -n 8 $(GPU_OPERATORS); operators=$$?; \
	python -m pytest tests/gpu $(GPU_OPERATORS:%=--ignore=%) && exit $$operators

check: setup
	ruff check .
	ruff format --check .
	pyright
	python -m pytest tests/tidy

bench: setup
	python -m benchmarks.all

# Load generators and evaluations of others against a server of keeper. VLLM=path/to/python adds `vllm bench serve`.
CLIENTS := $(VENV)/clients
clients: setup $(CLIENTS)/aiperf $(CLIENTS)/guidellm $(CLIENTS)/lm-eval
	python -m tests.clients --environments $(CLIENTS) $(if $(VLLM),--vllm $(VLLM)) $(NAMES)

$(CLIENTS)/%: tests/clients/%.txt
	$(PYTHON) -m venv $@
	if grep -q ^torch $<; then $@/bin/python -m pip install --quiet "$$(grep ^torch $<)"; fi
	uv pip install --quiet --python $@/bin/python -r $<
	touch $@

fuzz: setup
	FUZZ_EXAMPLES=2000 python -m pytest tests/unit -k fuzz

mutations: setup
	python -m tests.mutations

soak: setup
	SIM_RUNS=20000 python -m pytest tests/sim

soak-faults: setup
	FAULT_RUNS=50 python -m pytest tests/e2e/test_faults.py -s -k storm
	FAULT_RUNS=50 FAULT_RANKS=2 python -m pytest tests/e2e/test_faults.py -s -k storm

soak-nodes: setup
	LINE_RUNS=50 python -m pytest tests/e2e/test_nodes.py -k line

soak-overload: setup
	FLOOD_S=60 python -m pytest tests/e2e/test_overload.py -s -k flood

stubs: setup
	cd src && python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. tidemill/cluster/rpc/proto/*.proto

# What the examples of the Helm charts render to, and the part of their schema that is the configuration file's.
helm-golden: setup
	python -m tests.deploy.renew

metrics-doc: setup
	python -m tidemill.cluster.metrics.reference > docs/metrics.md

config-doc: setup
	python -m tidemill.cluster.config.reference > docs/configuration.md
	tidemill config schema > deploy/config.schema.json

# The status page, in BROWSER or the headless Chromium that apt brings.
browser: setup
	@[ -n "$$BROWSER" ] || command -v chromium >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && apt-get install -y -qq --no-install-recommends chromium; } \
	  || { echo "chromium is missing, the status page is tested in it: apt-get install chromium, or BROWSER=path"; exit 1; }
	BROWSER="$${BROWSER:-$$(command -v chromium)}" python -m pytest tests/browser

# With the CPU kernels compiled for each kind of CPU: runs where there is no g++.
wheel: setup
	rm -rf build
	python -m pip wheel --quiet --disable-pip-version-check --no-deps -c constraints.txt --wheel-dir dist .

# CycloneDX's list of what is installed, made by a program beside it.
SBOM := $(CURDIR)/$(VENV)/sbom
sbom: setup
	test -x $(SBOM)/bin/cyclonedx-py || { $(PYTHON) -m venv $(SBOM) \
	  && uv pip install --quiet --python $(SBOM)/bin/python -c constraints.txt cyclonedx-bom; }
	mkdir -p dist
	$(SBOM)/bin/cyclonedx-py environment --output-reproducible --output-file dist/sbom.json $(VENV)/bin/python

clean:
	rm -rf $(VENV) build dist src/*.egg-info
