# make demo: trains SmolLM2-135M with one-step-off GRPO.  make test: the tests.  Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Processes start from compiled files, whatever the shell says: some hundred interpreters.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := requirements/install.sh
comma := ,
empty :=
space := $(empty) $(empty)
# Three tests at a time: they wait for processes to start more than they compute.
TESTS = $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --durations 20 --durations-min 5
# The stages beyond `quick`: tests/stages.py says what each is. `make test-NAME` runs one of them.
STAGES := families ranks jobs kills hosts plugins exhaustive recipes
# Packages whose pins exclude rlgraph's have their own environments.
openenv_PACKAGES := openenv==0.10.0
verifiers_PACKAGES := verifiers==0.4.0
smolagents_PACKAGES := smolagents[openai]==1.26.0
langgraph_PACKAGES := langgraph==1.2.24 langchain-openai==1.7.4
OTHERS := openenv verifiers smolagents langgraph

.PHONY: demo test test-all test-stages $(STAGES:%=test-%) test-chaos test-sglang test-gpu test-environments worth check docs oracle setup clean
setup: $(READY)

$(READY): requirements/cpu.lock requirements/from_source.lock requirements/install.sh pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rlgraph needs Python 3.11 or newer; name one with make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(INSTALL) .venv --no-deps -r requirements/cpu.lock
	-$(INSTALL) .venv --no-deps -r requirements/from_source.lock  # needs a C compiler; only reasoning_gym needs it
	$(INSTALL) .venv --no-deps --no-build-isolation --editable .
	touch $@

demo: $(READY)
	$(BIN)/python recipes/one_step_off.py

# Whether the library works, in seven minutes.
test: $(READY)
	$(TESTS) --stage=quick $(PYTEST)

$(STAGES:%=test-%): test-%: $(READY)
	$(TESTS) --stage=$* $(PYTEST)

test-all: test test-stages

# The stages beyond `quick`: in one run, which keeps all cores busy until its last test; then the two that run by themselves, at once.
test-stages: $(READY)
	failed=; $(TESTS) --stage=$(subst $(space),$(comma),$(STAGES)) $(PYTEST) || failed=stages; \
		$(MAKE) --keep-going --jobs 2 --output-sync=target test-sglang test-chaos || failed="$$failed sglang or chaos"; \
		[ -z "$$failed" ] || { echo "failed: $$failed"; exit 1; }

# Random kills, cuts and freezes while a model is trained on three hosts.
test-chaos: $(READY)
	$(BIN)/python -m pytest --stage=chaos -o faulthandler_timeout=1500 $(PYTEST)

# SGLang in its own environment: its pins and vLLM's exclude each other.
test-sglang: .venv-sglang/.ready
	.venv-sglang/bin/python -m pytest --numprocesses 2 --dist loadfile --stage=sglang $(PYTEST)

.venv-sglang/.ready: requirements/sglang-cpu.lock $(READY)
	$(INSTALL) .venv-sglang --no-deps -r requirements/sglang-cpu.lock
	$(INSTALL) .venv-sglang --no-deps --no-build-isolation --editable .
	touch $@

# The adapters of packages whose pins exclude ours, and agents of smolagents and LangGraph, each in its own environment.
test-environments: $(READY) $(OTHERS:%=.venv-%/.ready) .venv-jobs/.ready
	$(BIN)/python -m pytest -m "apart or smolagents or langgraph" tests/environments/test_environment_servers.py tests/nodes/test_agent_frameworks.py $(PYTEST)
	$(BIN)/python -m pytest -m ray_jobs tests/runtime/test_ray_hosts.py $(PYTEST)

# In front of the packages of .venv: Ray with what accepts jobs, and coverage.
jobs_PACKAGES = "ray[default]==$$($(BIN)/python -c 'import ray; print(ray.__version__)')"
worth_PACKAGES = coverage==7.17.5
.venv-jobs/.ready .venv-worth/.ready: .venv-%/.ready: $(READY)
	$(INSTALL) .venv-$* $($*_PACKAGES)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>"$$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_beside.pth"
	touch $@

$(OTHERS:%=.venv-%/.ready): .venv-%/.ready: $(READY)
	$(INSTALL) .venv-$* $($*_PACKAGES)
	touch $@

# What the quick tests are worth: the lines that only one file of them reaches, and the planted faults that they notice. An hour.
worth: .venv-worth/.ready
	.venv-worth/bin/python tests/worth.py coverage
	.venv-worth/bin/python tests/worth.py faults

# On a machine with GPUs and its own torch, vLLM and Ray, as docs/parallel.md says: no environment is made.
test-gpu:
	$(PYTHON) -m pytest --stage=gpu tests/gpu

# What to run before each commit: a minute once mypy has its cache.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(TESTS) tests/project/test_docs.py -k examples

# The site, into site/. A link that leads nowhere is an error; the tests build it too.
docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

# The golden results that the tests of the algorithms compare with, written anew by verl itself, in an environment of its own.
oracle: .venv-oracle/.ready
	.venv-oracle/bin/python -W ignore tests/oracle/generate.py
	.venv-oracle/bin/python -W ignore tests/oracle/validation.py
	.venv-oracle/bin/python -W ignore tests/oracle/scripts.py

.venv-oracle/.ready: tests/oracle/requirements.txt $(READY)
	$(INSTALL) .venv-oracle -r tests/oracle/requirements.txt
	$(INSTALL) .venv-oracle --no-deps verl==0.9.1
	touch $@

clean:
	rm -rf .venv .venv-sglang .venv-oracle $(OTHERS:%=.venv-%) .venv-jobs .venv-worth build/worth runs
