# Everything runs in .venv, which tools/bootstrap.py makes; it returns at once when nothing changed.
# PYTHON: the interpreter to set up with.  ARGS: passed on to the command.  NAME: which bench.
PYTHON ?= python3
PY := .venv/bin/python
NAME ?= transfer
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with notebooks/sanitize.cfg

.PHONY: help setup setup-dev demo lab test notebooks check report bench upstream lock clean
.NOTPARALLEL:

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## install the lab into .venv
	@$(PYTHON) tools/bootstrap.py run

setup-dev: ## install the lab and its tests into .venv
	@$(PYTHON) tools/bootstrap.py dev

demo: setup ## one real transfer, end to end
	@$(PY) -m epdlab demo $(ARGS)

lab: setup ## JupyterLab on the notebooks
	@$(PY) -m epdlab lab $(ARGS)

test: setup-dev ## every test, the notebooks included
	@$(PY) -m pytest -m "not upstream" $(NBVAL) tests notebooks $(ARGS)

notebooks: setup-dev ## run the notebooks and store their outputs
	@$(PY) tools/run_notebooks.py $(ARGS)

check: setup-dev ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m mypy

report: setup ## build REPORT.md
	@$(PY) -m epdlab report $(ARGS)

bench: setup ## measure; NAME=transfer by default
	@$(PY) -m epdlab bench $(NAME) $(ARGS)

upstream: setup-dev ## drive SGLang's own releases
	@$(PY) -m epdlab.upstream $(ARGS)

lock: setup-dev ## resolve requirements.lock anew from pyproject.toml
	@$(PY) tools/lock.py

clean: ## remove caches and run output (remove .venv by hand to set up anew)
	@rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -exec rm -rf {} +
