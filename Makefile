# make demo: trains SmolLM2-135M with one-step-off GRPO.  make test: the tests.  Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
openenv_VERSION := 0.10.0
verifiers_VERSION := 0.4.0
smolagents_VERSION := 1.26.0
smolagents_EXTRAS := [openai]
langgraph_VERSION := 1.2.24
langgraph_BESIDE := langchain-openai==1.7.4
READY := .venv/.ready
# Three tests at a time: they wait for processes to start more than they compute. Those start from compiled files: some hundred interpreters.
TESTS = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --durations 40 --durations-min 5 $(PYTEST)

.PHONY: demo test test-chaos test-sglang test-gpu test-environments check docs oracle setup clean
setup: $(READY)

$(READY): requirements/cpu.lock requirements/from_source.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rlgraph needs Python 3.11 or newer; name one with make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/cpu.lock
	-$(BIN)/python -m pip install --quiet --no-deps -r requirements/from_source.lock  # needs a C compiler; only reasoning_gym needs it
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: $(READY)
	$(BIN)/python recipes/one_step_off.py

test: $(READY)
	$(TESTS)

# Five minutes of random kills, cuts and freezes while a model is trained on three hosts.
test-chaos: $(READY)
	$(BIN)/python -m pytest -m chaos -o faulthandler_timeout=1500 tests/runtime/test_chaos.py $(PYTEST)

# The tests of SGLang, in an environment of its own: its pins and vLLM's exclude each other.
test-sglang: .venv-sglang/.ready
	.venv-sglang/bin/python -m pytest -m sglang tests/engines/test_generators.py tests/engines/test_stepping.py tests/runtime/test_sglang_job.py tests/test_recipes.py $(PYTEST)

.venv-sglang/.ready: requirements/sglang-cpu.lock pyproject.toml
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --no-deps -r requirements/sglang-cpu.lock
	.venv-sglang/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# The adapters of packages whose pins exclude ours, and agents of smolagents and LangGraph, each in an environment of its own.
test-environments: $(READY) .venv-openenv/.ready .venv-verifiers/.ready .venv-smolagents/.ready .venv-langgraph/.ready .venv-jobs/.ready
	$(BIN)/python -m pytest -m "apart or smolagents or langgraph" tests/nodes/test_environment_servers.py tests/nodes/test_agent_frameworks.py $(PYTEST)
	$(BIN)/python -m pytest -m ray_jobs tests/runtime/test_ray_hosts.py $(PYTEST)

# Ray with what takes jobs, in front of the packages of .venv.
.venv-jobs/.ready: Makefile $(READY)
	$(BIN)/python -m venv .venv-jobs
	.venv-jobs/bin/python -m pip install --quiet "ray[default]==$$($(BIN)/python -c 'import ray; print(ray.__version__)')"
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>"$$(.venv-jobs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_beside.pth"
	touch $@

.venv-openenv/.ready .venv-verifiers/.ready .venv-smolagents/.ready .venv-langgraph/.ready: .venv-%/.ready: Makefile
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet '$*$($*_EXTRAS)==$($*_VERSION)' $($*_BESIDE)
	touch $@

# On a machine with GPUs and its own torch, vLLM and Ray, as docs/gpu.md says: no environment is made.
test-gpu:
	$(PYTHON) -m pytest -m "gpu or multi_gpu" tests/gpu

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(TESTS)

# The site, into site/. A link that leads nowhere is an error; the tests build it too.
docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

# The golden results that the tests of the algorithms compare with, written anew by verl itself, in an environment of its own.
oracle: .venv-oracle/.ready
	.venv-oracle/bin/python -W ignore tests/oracle/generate.py
	.venv-oracle/bin/python -W ignore tests/oracle/validation.py

.venv-oracle/.ready: tests/oracle/requirements.txt
	$(PYTHON) -m venv .venv-oracle
	.venv-oracle/bin/python -m pip install --quiet -r tests/oracle/requirements.txt
	.venv-oracle/bin/python -m pip install --quiet --no-deps verl==0.9.1
	touch $@

clean:
	rm -rf .venv .venv-sglang .venv-openenv .venv-verifiers .venv-smolagents .venv-langgraph .venv-jobs runs
