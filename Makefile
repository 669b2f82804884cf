# make book, make test: each sets up .venv first and needs nothing but Python 3.11+ and make
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HTML := _build/html/index.html
PAGES := $(wildcard book/*.ipynb book/*.md book/*.bib book/*.yml) $(shell find book/_static dsv41_edu kernels -type f -not -path '*/__pycache__/*') _config.yml _toc.yml
WORKERS ?= 2

.PHONY: help book test notebooks lab bench experiments train gpu mutants format clean
help:
	@echo "make book       build the book and say which file to open"
	@echo "make test       run every check"
	@echo "make notebooks  execute the pages again [NAMES='accounting ...']"
	@echo "make lab        open the pages in JupyterLab [LAB=--allow-root]"
	@echo "make bench      time ours against the peers [NAMES='prefix ...']"
	@echo "make experiments  train and simulate what the chapters plot [NAMES='moe ...']"
	@echo "make train      train the miniature and its drafter; stopped, it goes on where it was"
	@echo "make gpu        hold and time every kernel on a GPU; a dry run where there is none"
	@echo "make mutants    change the modules one operator at a time and list what no test notices [MODULES='dsv41_edu.config ...']"
	@echo "make format     format and lint the sources"
	@echo "make clean      remove the built book and the environment"

# one environment for everything; made again when the requirements change
$(VENV)/ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 1; }
	@echo "setting up $(VENV): a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on -e .
	@touch $@

# a failed build must leave nothing that the next one could take for built: unchanged pages are not read again
$(HTML): $(VENV)/ready $(PAGES)
	$(BIN)/jupyter-book build . -W -n --keep-going || { rm -rf _build; exit 1; }
	@touch $@

book: $(HTML)
	@echo "the book is built: open $(abspath $(HTML))"

test: book
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python book/_tools/notebooks.py check
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --nbval

notebooks: $(VENV)/ready
	$(BIN)/python book/_tools/notebooks.py build $(NAMES)

lab: $(VENV)/ready
	cd book && ../$(BIN)/jupyter lab $(LAB)

bench: $(VENV)/ready
	$(BIN)/python -m dsv41_edu.benchmarks.resources
	$(BIN)/python -m dsv41_edu.benchmarks $(NAMES)

experiments: $(VENV)/ready
	$(BIN)/python -m dsv41_edu.experiments $(NAMES)

train: $(VENV)/ready
	$(BIN)/python -m dsv41_edu.experiments.mini
	$(BIN)/python -m dsv41_edu.experiments.mini_drafter

gpu: $(VENV)/ready
	$(BIN)/python -m dsv41_edu.benchmarks.gpu $(if $(shell command -v nvidia-smi),,--dry-run)

MODULES ?= dsv41_edu.config dsv41_edu.config_rules dsv41_edu.tensors dsv41_edu.generations dsv41_edu.headers \
	dsv41_edu.accounting dsv41_edu.quantization dsv41_edu.claims
mutants: $(VENV)/ready
	$(BIN)/python tests/mutants.py $(MODULES)

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf _build $(VENV)
