# mixprec - `make help` lists what can be made.
#
# Variables: CC, CFLAGS, CPPFLAGS, LDFLAGS, LDLIBS, PREFIX, DESTDIR, and
#   OPENMP=      builds without OpenMP (default: with OpenMP if the compiler has it)
#   CUDA=dir     where CUDA is (default: searched in the usual places; CUDA= builds without)
#   WERROR=1     makes a warning an error      V=1   shows the commands
#   BUILD=dir    keeps another set of objects (say, of another compiler) beside build/

BUILD  ?= build
PREFIX ?= /usr/local
STD    ?= c99
CFLAGS ?= -O2
WARN   ?= -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual \
          -Wpointer-arith -Wwrite-strings -Wcast-align -Wstrict-prototypes
PYTHON ?= python3
VERSION := $(shell awk -F '"' '/define MIXPREC_VERSION "/ { print $$2 }' mixprec.h)

# CUDA's headers suffice for the tests on a simulated GPU; a real GPU needs nvcc.
CUDA ?= $(patsubst %/include/cuda_runtime.h,%,$(firstword \
            $(wildcard $(addsuffix /include/cuda_runtime.h,$(CUDA_HOME) /usr/local/cuda /usr \
                $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v nvcc)))))))
NVCC ?= $(if $(CUDA),$(firstword $(wildcard $(CUDA)/bin/nvcc)))
GPU  ?= $(if $(NVCC),$(firstword $(wildcard /dev/nvidia[0-9]* /dev/dxg)))
# CUDA_HERE: options of nvcc for the GPUs of this machine. -arch=native would leave the products of warpgroups out of
# code for capability 9.0, which only sm_90a has. Without a GPU: code for A100, RTX 40 and H100, and PTX for newer GPUs.
CAPABILITIES = $(sort $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)))
CUDA_HERE  = $(if $(filter 90,$(CAPABILITIES)),$(foreach c,$(CAPABILITIES:90=90a),-gencode arch=compute_$c$(,)code=sm_$c),-arch=native)
CUDA_ARCH ?= $(if $(GPU),$(CUDA_HERE),-gencode arch=compute_80,code=sm_80 -gencode arch=compute_89,code=sm_89 \
             -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_90,code=compute_90)
, := ,

.DEFAULT_GOAL := examples
.DELETE_ON_ERROR:

# --- what the machine has ----------------------------------------------------------------
# By default the C++ compiler is of the same kind as CC: clang++-16 for clang-16.
ifeq ($(origin CXX),default)
  in_place = $(if $(findstring clang,$(notdir $1)),$(filter-out ./,$(dir $1))$(subst clang,clang++,$(notdir $1)),$1)
  CXX := $(if $(findstring clang,$(CC)),$(foreach word,$(CC),$(call in_place,$(word))),$(CXX))
endif
ifeq ($(filter clean help install uninstall pack dist-files reference,$(MAKECMDGOALS)),)
  ifeq ($(origin OPENMP),undefined)
    OPENMP := $(shell mkdir -p $(BUILD) && \
        echo 'int omp_get_max_threads(void); int main(void) { return !omp_get_max_threads(); }' \
            >$(BUILD)/openmp.c && \
        $(CC) -fopenmp $(BUILD)/openmp.c $(LDFLAGS) -o $(BUILD)/openmp 2>/dev/null && echo -fopenmp)
  endif
  ifeq ($(MAKELEVEL),0)
    $(info mixprec $(VERSION): \
           CC=$(CC), CFLAGS=$(CFLAGS), OpenMP $(if $(OPENMP),found,not used))
  endif
endif

# The OpenMP runtime that CXX links, if the library was compiled with OpenMP: CXX's own runtime if
# it has the functions that CC calls, otherwise CC's. Never both. It is determined at the first use.
OMP_PROBE = cd $(BUILD) && echo 'int main(void) { _Pragma("omp parallel") ; return 0; }' >runtime.c && \
    $(CC) $(OPENMP) -c runtime.c -o runtime.o && $(CC) $(OPENMP) runtime.o $(LDFLAGS) -o runtime && \
    lib=$$(ldd runtime 2>/dev/null | awk '/omp/ { print $$3; exit }'); \
    for flags in '$(OPENMP)' "$$lib -Wl,-rpath,$${lib%/*}"; do \
        $(CXX) runtime.o $$flags -o runtime 2>/dev/null && echo $$flags && exit; done
OMP_FOUND = $(or $(shell $(OMP_PROBE)),$(error CXX=$(CXX) cannot link the OpenMP of CC=$(CC): set CXX to \
    a compiler of the same kind, or OPENMP= to do without))
OMP_LINK  = $(if $(OPENMP),$(eval OMP_LINK := $(OMP_FOUND))$(OMP_LINK))

# --- the products: mixprec.h and mixprec_cuda.cu are packed from the rooms under src/ -----
# The products are committed, so that a user only copies one file. The project's own builds compile
# BUILD/include instead: the same text with #line, so that compiler messages name the room.
ROOMS := $(wildcard src/*.[hc] src/*.cu src/*/*.[hc] src/*/*.cu)
HEADER = $(BUILD)/include/mixprec.h
COMPANION = $(BUILD)/include/mixprec_cuda.cu

# Each file is replaced atomically, because several builds may pack at once.
pack = $(Q)awk $1 -f src/pack.awk src/$(notdir $@) >$@.$$$$ && mv $@.$$$$ $@ || { rm -f $@.$$$$; exit 1; }

mixprec.h mixprec_cuda.cu: %: $(ROOMS) src/pack.awk
	$(call say,pack $@)
	$(call pack)
docs/pytorch.md: mixprec.h src/pytorch_names.txt src/names.awk
	$(call say,pack $@)
	$(Q)awk -f src/names.awk mixprec.h src/pytorch_names.txt $@ >$@.$$$$ && mv $@.$$$$ $@ || { rm -f $@.$$$$; exit 1; }
$(HEADER) $(COMPANION): $(BUILD)/include/%: % 
	$(Q)mkdir -p $(@D)
	$(call pack,-v lines=1)

# --- how a program is built --------------------------------------------------------------
# The implementation compiles slowly, so it is compiled once, into an archive. In programs that
# define MIXPREC_IMPLEMENTATION, MIXPREC_IMPLEMENTATION_DONE leaves it out. OWN (tests/tests.mk) names the
# programs that compile their own implementation, for its options or for the system's calls. All builds
# check invariants.
Q     := $(if $(V),,@)
CHECKED  = -include tests/support/checked.h
INCLUDES = -I$(BUILD)/include -I. -Itests -Itests/support
FLAGS  = -std=$(STD) $(WARN) $(if $(WERROR),-Werror) $(INCLUDES) $(CHECKED) $(CPPFLAGS) $(CFLAGS) $(OPENMP)
LIB   := $(BUILD)/libmixprec.a
BUILT  = $(LIB) $(HEADER) $(BUILD)/flags
say    = $(if $(V),,@echo "  $(1)")

# tcc knows neither DEPENDS nor the builtins of tests/support/checked.h: tests/tools/variant.sh removes both.
DEPENDS = -MMD -MP -MT $@ -MF $@.dep
done   = $(if $(filter $(OWN),$(notdir $@)),$(if $(filter $(HOST),$(notdir $@)),$(AS_HOST)),-DMIXPREC_IMPLEMENTATION_DONE)

# `light` optimises a program less than the library. It follows CFLAGS, because make cannot append
# to a CFLAGS of the command line. Most tests only call the compiled library: they take -O0 unless CFLAGS is
# given. BUSY (tests/tests.mk) names those with long loops of their own, which take -O1. INLINE names the tests of the
# header's inline functions, which a program compiles itself.
LIGHT  ?= $(if $(filter file,$(origin CFLAGS)),-O0)
INLINE  = test_formats test_bits test_numerics test_functions
light   = $(if $(filter $(INLINE),$(notdir $@)),,$(if $(filter $(BUILD)/test_%,$@),$(LIGHT)))

define link
$(call say,cc $@)
$(Q)mkdir -p $(@D)
$(Q)$(CC) $(FLAGS) $(light) $(done) $(DEPENDS) $< $(LIB) $(LDFLAGS) $(LDLIBS) -lm -o $@
endef

EXAMPLES := $(patsubst examples/%.c,$(BUILD)/%,$(filter-out %_fork.c %_mpi.c %_nccl.c %_tcp.c %_threads.c,$(wildcard examples/*.c examples/amp/*.c))) $(BUILD)/trainer
# Examples call the library for all that takes long.
$(EXAMPLES): private light = $(if $(filter file,$(origin CFLAGS)),-O1)
$(BUILD)/%: examples/%.c $(BUILT)   ; $(link)
$(BUILD)/trainer: examples/trainer/trainer.c $(BUILT) ; $(link)
# The trainer and llama are built with CUDA if this machine has a GPU; trainer_cuda and llama_cuda always are. A program's own
# variables are private: its prerequisites, BUILD/flags among them, must not see them.
CUDA_LIBS = -L$(CUDA)/lib64 -L$(CUDA)/lib -Wl,-rpath,$(CUDA)/lib64 -lcublasLt -lcudart
CUDA_LINK = $(BUILD)/mixprec_cuda.o $(CUDA_LIBS) -lstdc++
ifneq ($(GPU),)
$(BUILD)/trainer $(BUILD)/llama: $(BUILD)/mixprec_cuda.o
$(BUILD)/trainer $(BUILD)/llama: private done += -DTRAINER_CUDA
$(BUILD)/trainer $(BUILD)/llama: private LDLIBS += $(CUDA_LINK)
endif
$(BUILD)/trainer_cuda $(BUILD)/llama_cuda: private done += -DTRAINER_CUDA
$(BUILD)/trainer_cuda $(BUILD)/llama_cuda: private LDLIBS += $(CUDA_LINK)
$(BUILD)/trainer_cuda: examples/trainer/trainer.c $(BUILT) $(BUILD)/mixprec_cuda.o ; $(link)
$(BUILD)/llama_cuda: examples/llama.c $(BUILT) $(BUILD)/mixprec_cuda.o ; $(link)

# With a GPU, compiling should be fast: newer versions of nvcc use all cores for one file.
SPLIT := $(if $(GPU),$(shell $(NVCC) --help 2>/dev/null | grep -q -e '--split-compile ' && \
             echo --split-compile=0))
$(BUILD)/mixprec_cuda.o: $(COMPANION) $(HEADER)
	$(call say,nvcc $@$(if $(GPU),,: four to five minutes of a core. CUDA_ARCH=-arch=sm_80 compiles for one GPU only))
	$(Q)mkdir -p $(@D) && $(NVCC) -std=c++17 -O3 $(SPLIT) $(CUDA_ARCH) -I. -c $< -o $@

# The library is compiled in parts, which several cores compile at a time. PARTS= compiles it in one piece.
PARTS ?= host scalar avx2 avx512 neon
COMPILED := $(if $(PARTS),$(PARTS:%=$(BUILD)/mixprec_%.o),$(BUILD)/mixprec.o)
$(LIB): $(COMPILED)
	$(Q)rm -f $@ && $(AR) rcs $@ $^

$(BUILD)/mixprec_%.o: src/parts/mixprec_%.c $(HEADER) tests/support/checked.h $(BUILD)/flags
	$(call say,cc $@)
	$(Q)$(CC) $(FLAGS) -c $< -o $@

$(BUILD)/mixprec.o: $(HEADER) tests/support/checked.h $(BUILD)/flags
	$(call say,cc $@)
	$(Q)printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n' >$(BUILD)/mixprec.c
	$(Q)$(CC) $(FLAGS) -c $(BUILD)/mixprec.c -o $@

# Rewritten only if the compiler or its flags changed; then everything is rebuilt.
$(BUILD)/flags: always
	$(Q)mkdir -p $(BUILD)
	$(Q)echo '$(CC) $(FLAGS) $(LDFLAGS) $(LDLIBS)' | cmp -s - $@ || \
	    echo '$(CC) $(FLAGS) $(LDFLAGS) $(LDLIBS)' >$@

-include $(wildcard $(BUILD)/*.dep $(BUILD)/amp/*.dep $(BUILD)/bench/*.dep)

include tests/tests.mk packaging/packaging.mk tests/cuda/kit.mk

# --- what can be made --------------------------------------------------------------------
.PHONY: always pack examples run report show web cuda reference clean help
always:

examples: $(EXAMPLES)    ## build the examples (the default)

pack: mixprec.h mixprec_cuda.cu docs/pytorch.md   ## pack the rooms under src/ into mixprec.h and mixprec_cuda.cu

run: $(BUILD)/tiny_gpt   ## train a small GPT in fp16 on mixprec.h, a minute or two; BUILD/run/report.html
	@mkdir -p $(BUILD)/run
	$(BUILD)/tiny_gpt fp16 mixprec.h 1500 $(BUILD)/run

report: $(BUILD)/trainer   ## a longer run, of the trainer; BUILD/report/report.html draws loss, scale, gradients
	$(BUILD)/trainer --dtype fp16 --data mixprec.h --steps 3000 --log-every 20 \
	    --eval-every 250 --out $(BUILD)/report --overwrite
	@echo "open $(BUILD)/report/report.html"

# SEEDS, BATCH_SEEDS and TEXT: see the script. It compares with PyTorch if PYTHON has PyTorch.
show: $(BUILD)/proof $(BUILD)/trainer   ## train four models that plain fp16 cannot train, in five ways: BUILD/show/show.html
	$(Q)BUILD='$(BUILD)' PYTHON='$(PYTHON)' tests/bench/show.sh

# The link is a command of its own, without -O2: with
# it clang runs any wasm-opt that it finds, and some of them refuse vectors.
WASM_CC    ?= clang
WASM_FLAGS ?= -O2 -fno-slp-vectorize -fno-unroll-loops -msimd128
web: mixprec.h   ## a GPT that trains in a browser, in fp16: BUILD/web/index.html and page.wasm
	$(Q)mkdir -p $(BUILD)/web && echo 'int f(void); int f(void) { return 0; }' >$(BUILD)/web/probe.c
	$(Q)if ! $(WASM_CC) --target=wasm32-wasi -mexec-model=reactor $(BUILD)/web/probe.c -o $(BUILD)/web/probe.wasm \
	    2>$(BUILD)/web/probe.log; then cat $(BUILD)/web/probe.log >&2; echo 'web: no compiler for wasm32-wasi: set WASM_CC,' \
	    'or install clang, lld, wasi-libc and libclang-rt-14-dev-wasm32 (Debian; 14 is the version of clang)' >&2; exit 1; fi
	$(Q)rm -f $(BUILD)/web/probe.*
	$(Q)$(WASM_CC) --target=wasm32-wasi $(WASM_FLAGS) -I. -c examples/web/page.c -o $(BUILD)/web/page.o
	$(Q)$(WASM_CC) --target=wasm32-wasi -mexec-model=reactor -Wl,-s $(BUILD)/web/page.o -lm \
	    -o $(BUILD)/web/page.wasm && rm $(BUILD)/web/page.o && cp examples/web/index.html $(BUILD)/web/ && \
	    echo '$(PYTHON) -m http.server -d $(BUILD)/web, then open http://localhost:8000'

cuda:   ## build mixprec_cuda.o, and a trainer and a llama that can use a GPU (needs nvcc)
	$(Q)if [ -z '$(NVCC)' ]; then echo 'cuda: nvcc was not found; set CUDA=dir' >&2; exit 1; fi
	$(Q)$(MAKE) --no-print-directory $(BUILD)/trainer_cuda $(BUILD)/llama_cuda

reference:   ## the API reference, one page: BUILD/reference.html (needs Python)
	$(Q)mkdir -p $(BUILD) && $(PYTHON) src/reference.py >$(BUILD)/reference.html && echo "open $(BUILD)/reference.html"

clean:   ## remove everything that was built
	rm -rf $(BUILD)

# Users' targets in the order in which one wants them; all others are developers'.
USERS = run show examples reference web cuda shared install uninstall test report clean help
help:   ## list the targets
	@awk -F ':.*## ' -v users='$(USERS)' 'function show(name, text,    line, word, n, i) { \
	    line = sprintf("  make %-14s", name); n = split(text, word, " "); \
	    for (i = 1; i <= n; i++) { if (length(line " " word[i]) > 79) { print line; line = sprintf("%21s", "") } \
	        line = line " " word[i] } print line } \
	    /^[a-z-]+:.*## / { text[$$1] = $$2; order[++count] = $$1 } \
	    END { print "To use mixprec:"; n = split(users, user, " "); \
	        for (i = 1; i <= n; i++) { shown[user[i]] = 1; if (user[i] in text) show(user[i], text[user[i]]) } \
	        print "\nTo work on mixprec:"; \
	        for (i = 1; i <= count; i++) if (!(order[i] in shown)) show(order[i], text[order[i]]) }' $(filter Makefile %.mk,$(MAKEFILE_LIST))
	@echo
	@echo 'BUILD is the folder of what make builds: $(BUILD), or another with BUILD=dir'
