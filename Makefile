# Every target works on a fresh clone: it creates the virtual environment that it needs.
#   make demo         trains two real models under six precisions: a table and a picture
#   make test         the quick tier: run it before every commit. Its kinds alone: make test-unit,
#                     test-sound, test-docs and test-processes
#   make test-all     all tests: also further inputs and the examples' curves (an hour)
#   make test-newest  the quick tier on the newest JAX
#   make test-part    the part of the thorough tests that CI runs
#   make lint         ruff and mypy
#   make test-torch   checks that PyTorch's code in docs/coming_from gives the same losses as ours;
#                     test-paddle, test-mindspore, test-tensorflow and test-mpx check the others
#   make test-aot     the tests that compile for absent GPUs and TPUs (1.4 GB of compilers)
#   make canary       checks that the installed JAX has the internals that mpjax needs
#   make gate         checks that autocast takes no more memory and bytes than recorded (minutes;
#                     the same compilers)
#   make bench        the benchmarks' cpu suite          make page     rewrites the pages of results
#   make bench-aot    the aot suite (an hour; resumes)   make quality  the cpu suite's long case
#   make build        builds and checks the wheel and the sdist in dist/
#   make release-check  builds the wheel and the site, and tries the wheel in an empty environment:
#                     all of a release but the tag and the upload
#   make docker       builds the images mpjax:cpu and mpjax:cuda (needs a Docker daemon)
#   make docker-locks rewrites docker/requirements-*.txt from pyproject.toml
#   make flaky        the quick tier on fresh seeds under each instruction set of this processor
#                     (hours); resumes
#   make soak         10,000 steps with faults; a run that is killed and resumed 200 times (an hour)
#   make docs         builds the site in docs_out/html: executes its pages, checks its links, and
#                     tests it in a browser
#   make strangers    other libraries' test suites, with every differentiated function planned, under
#                     each policy (hours); resumes
#   make strangers-part  the same for some files of the installed packages (minutes)
#   make mutants      mutation tests, on lines that differ from BASE
#   make mutants-all  mutation tests on all lines (hours); resumes after an interruption
#   make mutants-sample  whether the tests (TIER=thorough: both tiers) still kill a fixed
#                     sample of mutants of all packages (an hour); resumes

PYTHON ?= python3
# The newest JAX needs Python 3.12 or later. The first of these that runs is used.
CANDIDATES := python3.14 python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python)
NEWEST_PYTHON ?= $(firstword $(foreach p,$(CANDIDATES),$(shell $(p) -c "print('$(p)')" 2>/dev/null)))

VENV := .venv
NEWEST := .venv-newest
AOT := .venv-aot
DOCS := .venv-docs
RIVALS := torch paddle mindspore tensorflow mpx
# `mutants` compares with this commit: origin/main if there is one, else the commit before the last.
BASE ?= $(firstword $(foreach r,origin/main HEAD~1 HEAD,$(shell git rev-parse --verify --quiet $(r))))
WORKERS ?= 2
TIER ?= quick
# Results are compared under the JAX version that they were recorded with.
RECORDED = $(shell $(PYTHON) -c "import json; print(json.load(open('benchmarks/results/gate_h100.json'))['versions']['jax'])")
PIP := pip install --quiet --disable-pip-version-check
PYTEST := -m pytest -n 2 --dist worksteal
EVERYTHING := -m "thorough or not thorough"
KINDS := unit sound docs processes

.PHONY: demo test test-all test-part $(KINDS:%=test-%) test-newest newest-python $(RIVALS:%=test-%) test-aot lint canary gate docs bench bench-aot page quality build release-check docker docker-locks soak flaky strangers strangers-part mutants mutants-all mutants-sample clean

demo: $(VENV)/ready
	$(VENV)/bin/python examples/demo.py

test: $(VENV)/ready
	$(VENV)/bin/python $(PYTEST)

$(KINDS:%=test-%): test-%: $(VENV)/ready
	$(VENV)/bin/python $(PYTEST) -m "$* and not thorough"

# Of the thorough tests, those of pages and recorded reports, and of the planner but for its random
# programs and for what repeats statements on accuracy for further settings (most of their time).
LONG := $(wildcard tests/core/autocast/test_*random*.py tests/core/autocast/test_sound_*.py)
PART := tests/test_docs.py tests/test_recorded.py tests/core/autocast $(LONG:%=--ignore %)

test-part: $(VENV)/ready
	$(VENV)/bin/python $(PYTEST) -m thorough $(PART)

test-all: $(VENV)/ready
	EXAMPLES_OUT=examples_out $(VENV)/bin/python $(PYTEST) $(EVERYTHING)

test-newest: $(NEWEST)/ready
	$(NEWEST)/bin/python $(PYTEST)

# Prints the Python that test-newest uses, if there is one.
newest-python:
	@echo $(NEWEST_PYTHON)

# Each rival has its own virtual environment.
$(RIVALS:%=test-%): test-%: $(VENV)/ready $(VENV)-%/ready
	$(VENV)/bin/python -m pytest $(EVERYTHING) tests/test_coming_from.py tests/benchmarks/test_gpu_figures.py -k $*

# The plugins look for a GPU and a TPU when they start, and print less on the CPU platform.
test-aot: $(AOT)/ready
	JAX_PLATFORMS=cpu $(AOT)/bin/python $(PYTEST) $(EVERYTHING) tests/tools/hardware

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

canary: $(VENV)/ready
	$(VENV)/bin/python tests/helpers/canary.py

# Half of the models in each of two processes, because most of a compilation runs on one core.
gate: $(AOT)/ready
	$(AOT)/bin/python -c "from benchmarks.gate import CASES; print(*CASES)" \
	    | xargs -n 5 -P 2 $(AOT)/bin/python -m benchmarks --suite gate

# A warning fails the build: a page in no table of contents, or a name or link without a target.
# -E: pages of an earlier build would not get the words that users search for.
docs: $(DOCS)/ready
	$(DOCS)/bin/sphinx-build -E -W -n -j 2 -b html docs docs_out/html
	SITE=docs_out/html $(DOCS)/bin/python -m pytest -q --confcutdir tests/site tests/site/test_browse.py

bench: $(VENV)/bench
	$(VENV)/bin/python -m benchmarks --suite cpu

bench-aot: $(AOT)/ready
	$(AOT)/bin/python -m benchmarks --suite aot

page: $(VENV)/ready
	$(VENV)/bin/python -m benchmarks --page

quality: $(VENV)/bench
	$(VENV)/bin/python -m benchmarks --suite cpu quality

build: $(VENV)-build/ready
	rm -rf dist
	$(VENV)-build/bin/python -m build
	$(VENV)-build/bin/twine check --strict dist/*

release-check: build docs
	$(VENV)-build/bin/python tests/helpers/release.py

$(VENV)-build/ready:
	$(PYTHON) -m venv $(VENV)-build
	$(VENV)-build/bin/$(PIP) build twine uv==0.13.9
	touch $@

docker:
	@docker info > /dev/null 2>&1 || { echo "make docker: no Docker daemon runs here" >&2; exit 1; }
	for target in cpu cuda; do \
	    docker build --file docker/Dockerfile --target $$target --tag mpjax:$$target . || exit 1; \
	done

LOCK := $(VENV)-build/bin/uv pip compile --quiet --upgrade --python-version 3.13 \
	--python-platform x86_64-manylinux_2_28 --no-header --no-annotate --no-emit-index-url
EXTRAS := --extra cli --extra html --extra checkpoint --extra safetensors

docker-locks: $(VENV)-build/ready
	$(LOCK) $(EXTRAS) pyproject.toml --output-file docker/requirements-cpu.txt
	$(LOCK) $(EXTRAS) --extra cuda12 pyproject.toml --output-file docker/requirements-cuda.txt
	echo hatchling | $(LOCK) - --output-file docker/requirements-build.txt

soak: $(VENV)/ready
	STEPS=10000 $(VENV)/bin/python -m pytest tests/core/training/test_soak.py
	KILLS=200 $(VENV)/bin/python -m pytest -s -m thorough tests/checkpoint/test_kills.py

flaky: $(VENV)/ready
	$(VENV)/bin/python tests/helpers/flaky.py --workers $(WORKERS)

strangers: $(VENV)/ready
	$(VENV)/bin/python tests/helpers/strangers.py

strangers-part: $(VENV)/ready
	$(VENV)/bin/python tests/helpers/strangers.py --part --workers 2

mutants: $(VENV)/mutants
	$(VENV)/bin/python tests/helpers/mutants.py --base "$(BASE)" --workers $(WORKERS)

# A tier of the tests (quick or thorough) must kill what was killed when the sample was drawn.
mutants-sample: $(VENV)/ready
	$(VENV)/bin/python tests/helpers/sample.py $(TIER) --workers $(WORKERS)

mutants-all: $(VENV)/mutants
	$(VENV)/bin/python tests/helpers/mutants.py --resume --workers $(WORKERS)

$(VENV)/bench: $(VENV)/ready
	$(VENV)/bin/$(PIP) --editable ".[bench]"
	touch $@

$(VENV)/mutants: $(VENV)/ready
	$(VENV)/bin/$(PIP) --editable ".[mutants]"
	touch $@

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/$(PIP) --upgrade pip
	$(VENV)/bin/$(PIP) --editable ".[dev]"
	touch $@

torch = numpy torch==2.13.0
paddle = setuptools "numpy<2.4" paddlepaddle==3.3.1
mindspore = setuptools "numpy<2" mindspore==2.10.0
tensorflow = tensorflow-cpu==2.21.0 keras==3.15.1
mpx = mixed-precision-for-JAX==0.1.8 optax
# PyTorch without CUDA, if PyTorch's own index can be reached.
indexes_torch = --retries 0 --index-url https://download.pytorch.org/whl/cpu

$(RIVALS:%=$(VENV)-%/ready): $(VENV)-%/ready:
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/$(PIP) $(indexes_$*) $($*) || $(VENV)-$*/bin/$(PIP) $($*)
	touch $@

$(NEWEST)/ready: pyproject.toml
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/$(PIP) --upgrade pip
	$(NEWEST)/bin/$(PIP) --editable ".[dev]"
	touch $@

$(AOT)/ready: pyproject.toml
	$(PYTHON) -m venv $(AOT)
	$(AOT)/bin/$(PIP) --upgrade pip
	$(AOT)/bin/$(PIP) --editable ".[aot,bench,html]" "jax==$(RECORDED)" pytest pytest-xdist hypothesis
	touch $@

$(DOCS)/ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/$(PIP) --upgrade pip
	$(DOCS)/bin/$(PIP) --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-build $(NEWEST) $(AOT) $(DOCS) $(RIVALS:%=$(VENV)-%) .mutants .compiled docs_out
