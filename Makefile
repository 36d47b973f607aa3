# `make demo` runs the main job, `make test` the tests; each target sets up what it needs.
SHELL := /bin/bash
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
DEBIAN_LIBS := $(CURDIR)/$(VENV)/lib-debian
export LD_LIBRARY_PATH := $(DEBIAN_LIBS)$(addprefix :,$(LD_LIBRARY_PATH))
PYTHON ?= python3
STAMP := $(VENV)/.ready

.PHONY: setup demo test browser triton triton-3.6 gpu check bench clients fuzz mutations soak soak-faults soak-overload stubs metrics-doc clean

setup: $(STAMP)

# torch comes with plain pip, which finds a local CPU build where there is one; uv installs the rest in seconds, with
# bytecode: each Ray process would compile it again otherwise.
$(STAMP): pyproject.toml setup.py constraints.txt deploy/mooncake_libs.sh
	@command -v g++ >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -y -qq --no-install-recommends g++; } \
	  || { echo "g++ is missing, the CPU kernels are compiled with it: apt-get install g++"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	$(VENV)/bin/uv pip install --quiet --compile-bytecode -c constraints.txt -e '.[dev,mooncake]'
	deploy/mooncake_libs.sh $(VENV)/bin/python $(DEBIAN_LIBS)
	touch $(STAMP)

demo: setup
	tidemill demo

# Two processes: a third makes servers wait for each other. The tests of a file share its servers, so they stay together.
test: setup triton
	python -m pytest -n 2 --dist loadfile

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
gpu: setup
	python -m pytest tests/gpu

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

soak-overload: setup
	FLOOD_S=60 python -m pytest tests/e2e/test_overload.py -s

stubs: setup
	cd src && python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. tidemill/cluster/proto/*.proto

metrics-doc: setup
	python -m tidemill.cluster.http.metrics_reference > docs/metrics.md

# The status page, in BROWSER or the headless Chromium that apt brings.
browser: setup
	@[ -n "$$BROWSER" ] || command -v chromium >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && apt-get install -y -qq --no-install-recommends chromium; } \
	  || { echo "chromium is missing, the status page is tested in it: apt-get install chromium, or BROWSER=path"; exit 1; }
	BROWSER="$${BROWSER:-$$(command -v chromium)}" python -m pytest tests/browser

clean:
	rm -rf $(VENV) build dist src/*.egg-info
