# make train and make test each work on a machine that has only Python 3.11 or newer and make.
PYTHON ?= python3
VENV = .venv
RUN = $(VENV)/bin/python

help:
	@echo "make train      learn from corpus.txt, then write (about a minute)"
	@echo "make generate   let the trained model write"
	@echo "make demo       play the 61 worked examples"
	@echo "make test       run all tests"
	@echo "make golden     write the golden files anew, after an intended change"
	@echo "make gradcheck  hold every gradient against central differences"
	@echo "make bench      measure speed and memory"
	@echo "make clean      remove what was installed and trained here"

$(VENV)/run:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'tinygpt needs Python 3.11')"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check "numpy>=1.26"
	touch $@

$(VENV)/test: $(VENV)/run
	$(RUN) -m pip install --quiet --disable-pip-version-check "pytest>=8" "syrupy>=5"
	touch $@

train: $(VENV)/run
	$(RUN) tinygpt.py train

generate: $(VENV)/run
	$(RUN) tinygpt.py generate

demo: $(VENV)/run
	$(RUN) tinygpt.py demo

gradcheck: $(VENV)/run
	$(RUN) tinygpt.py gradcheck

bench: $(VENV)/run
	$(RUN) tinygpt.py bench

test: $(VENV)/test
	$(RUN) -m pytest -q -p no:cacheprovider tests

golden: $(VENV)/test
	$(RUN) -m pytest -q -p no:cacheprovider -p no:warnings tests/test_golden.py --snapshot-update

clean:
	rm -rf $(VENV) __pycache__ tests/__pycache__ tinygpt.npz

.PHONY: help train generate demo gradcheck bench test golden clean
