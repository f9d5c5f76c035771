# bench.mk - the programs that measure; tests/tests.mk includes it.
# SPDX-License-Identifier: MIT OR Unlicense

BENCHES  := $(patsubst tests/bench/%.c,$(BUILD)/bench/%,$(wildcard tests/bench/*.c))

$(BUILD)/bench/%: tests/bench/%.c $(BUILT) ; $(link) -lpthread
# A script calls the installed peers from one process: see tests/bench/peers.py.
$(BUILD)/bench/libpeers.so: tests/bench/peers.cpp mixprec.h
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) -std=c++17 -O2 $(OPENMP) -fPIC -shared -I. $< -ldl -lm -o $@

$(BUILD)/bench/libsmall.so: tests/bench/small.cpp mixprec.h
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) -std=c++17 -O2 $(OPENMP) -fPIC -shared -I. $< -lm -o $@

$(BUILD)/bench/libconv.so: tests/bench/conv.cpp examples/conv.h mixprec.h
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) -std=c++17 -O2 $(OPENMP) -fPIC -shared -I. $< -lm -o $@

# The bench for a GPU. Without a GPU it still links, and reports that there is none.
$(BUILD)/bench_cuda: tests/bench/bench_cuda.cpp tests/support/ledger.h $(BUILD)/mixprec_cuda.o $(LIB)
	$(call say,c++ $@)
	$(Q)$(CXX) -std=c++17 -Wall -Wextra $(if $(WERROR),-Werror) -O2 -isystem $(CUDA)/include -I. \
	    $< $(LIB) $(CUDA_LINK) $(OMP_LINK) -ldl -lm -o $@

# Benches are built to check that they still compile with the header. Those with an implementation of their own, half a
# minute each, are only parsed.
BENCH_PARSED = $(addprefix $(BUILD)/bench/,bench_optimizer tiles_rest)
BENCH_BUILDS = $(filter-out $(BENCH_PARSED),$(BENCHES)) $(BENCH_PARSED:%=%.parsed) \
               $(if $(shell command -v $(CXX)),$(addprefix $(BUILD)/bench/,peers.parsed small.parsed conv.parsed))
$(BENCH_PARSED:%=%.parsed): $(BUILD)/bench/%.parsed: tests/bench/%.c $(HEADER) $(BUILD)/flags
	$(call say,cc $@)
	$(Q)mkdir -p $(@D) && $(CC) $(FLAGS) -fsyntax-only $< && touch $@
$(BUILD)/bench/%.parsed: tests/bench/%.cpp examples/conv.h mixprec.h
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) -std=c++17 $(OPENMP) -I. -fsyntax-only $< && touch $@

.PHONY: bench bench-small bench-conv bench-llama bench-kernels bench-cuda ledger

bench: $(BUILD)/bench/libpeers.so $(BUILD)/bench/bench_threads examples   ## mixprec beside the installed peer libraries (takes minutes)
	$(Q)BUILD='$(BUILD)' PYTHON='$(PYTHON)' tests/bench/run.sh

bench-small: $(BUILD)/bench/libsmall.so   ## a small network's step beside PyTorch's, in turns
	$(Q)$(PYTHON) tests/bench/small.py $(BUILD)/bench/libsmall.so

bench-conv: $(BUILD)/bench/libconv.so   ## conv2d of examples/conv.h beside PyTorch's, in turns
	$(Q)$(PYTHON) tests/bench/conv.py $(BUILD)/bench/libconv.so

bench-llama: $(BUILD)/llama   ## a step of examples/llama.c beside transformers', in turns (needs torch and peft)
	$(Q)mkdir -p $(BUILD)/bench && $(PYTHON) tests/support/llama_models.py smollm2 $(BUILD)/bench/smollm2 docs/guide.md
	$(Q)$(PYTHON) tests/bench/llama.py $(BUILD)/llama $(BUILD)/bench/smollm2 3 1

bench-kernels: $(BENCHES)   ## the kernels of every instruction set, without peers (takes minutes)
	$(Q)for b in $(BENCHES); do echo "== $$b"; $$b || exit 1; done

bench-cuda:   ## measure the kernels and GPT-2 steps on a GPU (needs nvcc)
	$(Q)if [ -z '$(NVCC)' ]; then echo 'bench-cuda: nvcc was not found; set CUDA=dir' >&2; exit 1; fi
	$(Q)$(MAKE) --no-print-directory $(BUILD)/bench_cuda && $(BUILD)/bench_cuda $(BENCH_ARGS)

ledger: $(BUILD)/bench/ledger   ## a model of what GPTs' steps move, compute and keep on five GPUs
	$(Q)$(BUILD)/bench/ledger
