# make train and make test each work on a machine that has only Python 3.11 or newer and make.
PYTHON ?= python3
VENV = .venv
SEED = 1
CARDS = 1-61
RUN = $(VENV)/bin/python
PYTEST = $(RUN) -m pytest -q -p no:cacheprovider

help:
	@echo "make train      learn from corpus.txt, then write (about half a minute)"
	@echo "make generate   let the trained model write"
	@echo "make demo       play the 61 worked examples"
	@echo "make book       write the book as one page for a browser, tinygpt.html"
	@echo "make check      after a change: which examples print something else, and why"
	@echo "make test       run all tests"
	@echo "make golden     write the golden files anew, after an intended change"
	@echo "make gradcheck  hold every gradient against central differences"
	@echo "make bench      measure speed and memory"
	@echo "make mutants    change each line of the mathematics in turn, to see that the tests notice"
	@echo "make hunt       SEED=7: write the book with a fault to be found, hunt-7.py"
	@echo "make clean      remove what was installed and trained here"

$(VENV)/run:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'tinygpt needs Python 3.11')"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check "numpy>=1.26"
	touch $@

$(VENV)/test: $(VENV)/run
	$(RUN) -m pip install --quiet --disable-pip-version-check "pytest>=8" "syrupy>=5"
	touch $@

train generate demo book gradcheck bench: $(VENV)/run
	$(RUN) tinygpt.py $@

check: $(VENV)/run
	$(RUN) tinygpt.py demo --changed

test: $(VENV)/test
	$(PYTEST) tests/test_golden.py tests

golden: $(VENV)/test
	$(PYTEST) -p no:warnings tests/test_golden.py tests/test_page.py --snapshot-update

mutants: $(VENV)/test
	$(RUN) tests/mutants.py

hunt: $(VENV)/test
	@$(RUN) tests/mutants.py hunt "$(SEED)" "$(LEVEL)" "$(CARDS)" "$(ANSWER)"

clean:
	rm -rf $(VENV) __pycache__ tests/__pycache__ tinygpt.npz tinygpt.html hunt-*.py

.PHONY: help train generate demo book gradcheck bench check test golden mutants hunt clean
