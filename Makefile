# mixprec - `make help` lists what can be made.
#
# Yours to set: CC, CFLAGS, CPPFLAGS, LDFLAGS, LDLIBS, PREFIX, DESTDIR, and
#   OPENMP=      builds without OpenMP (otherwise used when the compiler has it)
#   CUDA=dir     where CUDA is (found by itself in the usual places; CUDA= does without)
#   WERROR=1     makes a warning an error      V=1   shows the commands
#   BUILD=dir    keeps another set of objects (say, of another compiler) beside build/

BUILD  ?= build
PREFIX ?= /usr/local
STD    ?= c99
CFLAGS ?= -O2
WARN   ?= -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual \
          -Wpointer-arith -Wwrite-strings -Wcast-align -Wstrict-prototypes
PYTHON ?= python3

# CUDA's headers suffice for the tests on a simulated GPU, nvcc builds for a real one.
CUDA ?= $(patsubst %/include/cuda_runtime.h,%,$(firstword \
            $(wildcard $(addsuffix /include/cuda_runtime.h,$(CUDA_HOME) /usr/local/cuda /usr))))
NVCC ?= $(if $(CUDA),$(firstword $(wildcard $(CUDA)/bin/nvcc)))
GPU  ?= $(if $(NVCC),$(firstword $(wildcard /dev/nvidia[0-9]* /dev/dxg)))
CUDA_ARCH ?= $(if $(GPU),-arch=native,-gencode arch=compute_80,code=sm_80 \
             -gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90)

.DEFAULT_GOAL := examples
.DELETE_ON_ERROR:

# --- what the machine has ----------------------------------------------------------------
# Unless you say otherwise, C++ is compiled by the compiler that CC is of: clang-16, clang++-16.
ifeq ($(origin CXX),default)
  in_place = $(if $(findstring clang,$(notdir $1)),$(filter-out ./,$(dir $1))$(subst clang,clang++,$(notdir $1)),$1)
  CXX := $(if $(findstring clang,$(CC)),$(foreach word,$(CC),$(call in_place,$(word))),$(CXX))
endif
ifeq ($(filter clean help install uninstall,$(MAKECMDGOALS)),)
  ifeq ($(origin OPENMP),undefined)
    OPENMP := $(shell mkdir -p $(BUILD) && \
        echo 'int omp_get_max_threads(void); int main(void) { return !omp_get_max_threads(); }' \
            >$(BUILD)/openmp.c && \
        $(CC) -fopenmp $(BUILD)/openmp.c $(LDFLAGS) -o $(BUILD)/openmp 2>/dev/null && echo -fopenmp)
  endif
  ifeq ($(MAKELEVEL),0)
    $(info mixprec $(shell awk -F '"' '/define MIXPREC_VERSION "/ { print $$2 }' mixprec.h): \
           CC=$(CC), CFLAGS=$(CFLAGS), OpenMP $(if $(OPENMP),found,not used))
  endif
endif

# What CXX links the library with, where that was compiled with OpenMP: its own runtime, if it knows what
# CC calls, else CC's. Never both. Asked at the first use.
OMP_PROBE = cd $(BUILD) && echo 'int main(void) { _Pragma("omp parallel") ; return 0; }' >runtime.c && \
    $(CC) $(OPENMP) -c runtime.c -o runtime.o && $(CC) $(OPENMP) runtime.o $(LDFLAGS) -o runtime && \
    lib=$$(ldd runtime 2>/dev/null | awk '/omp/ { print $$3; exit }'); \
    for flags in '$(OPENMP)' "$$lib -Wl,-rpath,$${lib%/*}"; do \
        $(CXX) runtime.o $$flags -o runtime 2>/dev/null && echo $$flags && exit; done
OMP_FOUND = $(or $(shell $(OMP_PROBE)),$(error CXX=$(CXX) cannot link the OpenMP of CC=$(CC): set CXX to \
    a compiler of the same kind, or OPENMP= to do without))
OMP_LINK  = $(if $(OPENMP),$(eval OMP_LINK := $(OMP_FOUND))$(OMP_LINK))

# --- how a program is built --------------------------------------------------------------
# The implementation takes a while to compile, so that is done once, into an archive. Programs
# that define MIXPREC_IMPLEMENTATION are told that it is done already; OWN names those that have
# one of their own, for its options or the system's calls. All of it checks its invariants.
Q     := $(if $(V),,@)
CHECKED = -include tests/checked.h
FLAGS  = -std=$(STD) $(WARN) $(if $(WERROR),-Werror) -I. -Itests $(CHECKED) $(CPPFLAGS) $(CFLAGS) $(OPENMP)
LIB   := $(BUILD)/libmixprec.a
BUILT  = $(LIB) $(BUILD)/flags
say    = $(if $(V),,@echo "  $(1)")

OWN    = test_checkpoint test_checkpoint_stdio test_threads test_amx test_block bench_optimizer
# tcc knows neither these nor tests/checked.h's builtins: tests/variant.sh takes both away.
DEPENDS = -MMD -MP -MT $@ -MF $@.d
done   = $(if $(filter $(OWN),$(notdir $@)),,-DMIXPREC_IMPLEMENTATION_DONE)

# What is optimised less than the library is: after CFLAGS, as a CFLAGS given on the command line could
# not be added to. Tests only call what is compiled already: tests/variant.sh saves there with LIGHT=-O0,
# but for those of what a program compiles itself, the header's inline functions.
INLINE  = test_formats test_bits test_numerics test_functions
light   = $(if $(filter $(INLINE),$(notdir $@)),,$(if $(filter $(BUILD)/test_%,$@),$(LIGHT)))

define link
$(call say,cc $@)
$(Q)mkdir -p $(@D)
$(Q)$(CC) $(FLAGS) $(light) $(done) $(DEPENDS) $< $(LIB) $(LDFLAGS) $(LDLIBS) -lm -o $@
endef

# Those that need no speed and have a copy of all of mixprec.h.
$(OWN:%=$(BUILD)/%): private light = -O0
$(BUILD)/test_threads $(BUILD)/test_ranks_refused: private LDLIBS += -pthread

# Those that look inside it: what they do not call themselves is left out (tests/internals.h).
$(BUILD)/test_optimizers $(BUILD)/test_pairs: private light = -O1 -fno-inline

EXAMPLES := $(patsubst examples/%.c,$(BUILD)/%,$(filter-out %_fork.c %_mpi.c %_nccl.c,$(wildcard examples/*.c)))
TESTS    := $(patsubst tests/%.c,$(BUILD)/%,$(wildcard tests/test_*.c))
LONG     := $(patsubst tests/%.c,$(BUILD)/%,$(wildcard tests/long_*.c))
BENCHES  := $(patsubst tests/bench/%.c,$(BUILD)/bench/%,$(wildcard tests/bench/*.c))

$(BUILD)/%: examples/%.c $(BUILT)   ; $(link)
$(BUILD)/%: tests/%.c $(BUILT)      ; $(link)
# Those with a copy need not wait for the library.
OWN_TESTS := $(patsubst %,$(BUILD)/%,$(filter test_%,$(OWN)))
$(OWN_TESTS): private LIB =
$(OWN_TESTS): $(BUILD)/%: tests/%.c mixprec.h $(BUILD)/flags ; $(link)
$(BUILD)/bench/%: tests/bench/%.c $(BUILT) ; $(link) -lpthread

# What the header offers to C++ alone.
CPP_TESTS := $(if $(shell command -v $(CXX)),$(BUILD)/test_scopes)
$(BUILD)/test_scopes: tests/test_scopes.cpp $(BUILT) tests/test.h
	$(call say,c++ $@)
	$(Q)$(CXX) -std=c++11 $(filter-out -Wstrict-prototypes,$(WARN)) $(if $(WERROR),-Werror) -O1 -I. -Itests \
	    $< $(LIB) $(OMP_LINK) -lm -o $@

# Peers that are installed are called from one process, by a script: see tests/bench/peers.py.
$(BUILD)/bench/libpeers.so: tests/bench/peers.cpp mixprec.h
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) -std=c++17 -O2 $(OPENMP) -fPIC -shared -I. $< -ldl -lm -o $@

# The trainer uses a GPU where there is one to use; tiny_gpt_cuda can, wherever it is built.
CUDA_LIBS = -L$(CUDA)/lib64 -L$(CUDA)/lib -Wl,-rpath,$(CUDA)/lib64 -lcublasLt -lcudart
CUDA_LINK = $(BUILD)/mixprec_cuda.o $(CUDA_LIBS) -lstdc++
ifneq ($(GPU),)
$(BUILD)/tiny_gpt: $(BUILD)/mixprec_cuda.o
$(BUILD)/tiny_gpt: done += -DTINY_GPT_CUDA
$(BUILD)/tiny_gpt: LDLIBS += $(CUDA_LINK)
endif
$(BUILD)/tiny_gpt_cuda: done += -DTINY_GPT_CUDA
$(BUILD)/tiny_gpt_cuda: LDLIBS += $(CUDA_LINK)
$(BUILD)/tiny_gpt_cuda: examples/tiny_gpt.c $(BUILT) $(BUILD)/mixprec_cuda.o ; $(link)

# Where there is a GPU nobody should wait for it: newer nvcc use all cores for one file.
SPLIT := $(if $(GPU),$(shell $(NVCC) --help 2>/dev/null | grep -q -e '--split-compile ' && \
             echo --split-compile=0))
$(BUILD)/mixprec_cuda.o: mixprec_cuda.cu mixprec.h
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(NVCC) -std=c++17 -O3 $(SPLIT) $(CUDA_ARCH) -I. -c $< -o $@

# The companion compiled by a C++ compiler for a simulated GPU: plain for the quick tests, and with
# the sanitizers, which take three times as long, for the long ones.
# The simulation's own tests look at what the sanitizers say, so they always have them.
CUDA_SANE  := $(if $(CUDA),$(patsubst tests/%.cpp,$(BUILD)/sane/%,$(wildcard tests/test_cuda*.cpp)))
CUDA_PLAIN := $(patsubst $(BUILD)/sane/%,$(BUILD)/%,$(filter-out %/test_cudasim,$(CUDA_SANE)))
CUDA_TESTS := $(strip $(CUDA_PLAIN) $(filter %/test_cudasim,$(CUDA_SANE)))
SANE        = -g1 -fsanitize=address,undefined -fno-sanitize-recover=all
$(BUILD)/sane/test_cudasim: private SANE += -O0
SIM_FLAGS   = -std=c++17 $(CHECKED) -Wall -Wextra $(if $(WERROR),-Werror) -O1 -DMIXPREC_CUDASIM \
              -fno-strict-aliasing -ffp-contract=off -isystem $(CUDA)/include -I. -Itests

# mixprec_cuda.cu takes most of the time: it is compiled once, and all of these link it. Those that do
# not look inside it see its face; the others compile what stands before its table, too, of which
# what they call is left.
CUDA_OUTSIDE := test_cuda_by_hand test_cuda_face test_cuda_functions test_cuda_guard test_cuda_muon test_cuda_products test_cuda_ranks \
                test_cuda_rows test_cuda_states test_cuda_training
OUTSIDE := $(CUDA_OUTSIDE:%=$(BUILD)/%) $(CUDA_OUTSIDE:%=$(BUILD)/sane/%)
INSIDE  := $(filter-out $(OUTSIDE) %/test_cudasim,$(CUDA_PLAIN) $(CUDA_SANE))
$(OUTSIDE): private SIM_FLAGS += -DCOMPANION_LINKED
$(INSIDE): private SIM_FLAGS += -DCOMPANION_INSIDE='"$(BUILD)/companion_inside.cu"' -Wno-unused-function
$(INSIDE): $(BUILD)/companion_inside.cu
$(addsuffix /test_cuda_by_hand,$(BUILD) $(BUILD)/sane $(BUILD)/gpu): examples/by_hand_cuda.cu
$(CUDA_PLAIN): $(BUILD)/cudasim_plain.o
$(filter-out %/test_cudasim,$(CUDA_SANE)): $(BUILD)/cudasim.o $(LIB)

$(BUILD)/companion_inside.cu: mixprec_cuda.cu
	$(Q)mkdir -p $(@D) && { echo '#line 1 "mixprec_cuda.cu"'; sed '/>>table ==/,$$d' $<; } >$@

$(CUDA_PLAIN): $(BUILD)/%: tests/%.cpp $(LIB) mixprec_cuda.cu $(wildcard tests/*.h)
	$(call say,c++ $@)
	$(Q)$(CXX) $(SIM_FLAGS) $< $(filter %.o,$^) $(LIB) $(OMP_LINK) -lm -o $@

$(CUDA_SANE): $(BUILD)/sane/%: tests/%.cpp mixprec.h mixprec_cuda.cu $(wildcard tests/*.h)
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(SIM_FLAGS) $(SANE) $< $(filter %.o,$^) $(filter %.a,$^) $(OMP_LINK) -lm -o $@

# With products and sums joined, as nvcc joins them, and with the one NaN of a GPU's arithmetic: what is
# promised to the bit must still hold. It takes gcc, which can leave two registers alone.
CUDA_FMA := $(if $(and $(CUDA),$(filter x86_64,$(shell uname -m)),$(if $(findstring clang,$(CXX)),,1)), \
                $(BUILD)/fma/test_cuda $(BUILD)/fma/test_cuda_optimizers)

ONE_NAN = -mfma -ffp-contract=fast -ffixed-xmm14 -ffixed-xmm15 -DCUDASIM_ONE_NAN

$(CUDA_FMA): $(BUILD)/fma/%: tests/%.cpp tests/canonical_nan.awk $(LIB) mixprec_cuda.cu $(wildcard tests/*.h)
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(SIM_FLAGS) $(ONE_NAN) -S $< -o $@.raw.s
	$(Q)awk -f tests/canonical_nan.awk $@.raw.s >$@.s && rm -f $@.raw.s
	$(Q)$(CXX) $@.s $(LIB) $(OMP_LINK) -lm -o $@

# The same tests for the GPU that is there, or, where there is none, to see that they link: then
# nobody assembles them.
GPU_TESTS := $(if $(NVCC),$(patsubst tests/%.cpp,$(BUILD)/gpu/%,$(filter-out \
                 tests/test_cudasim.cpp,$(wildcard tests/test_cuda*.cpp))))
GPU_FLAGS  = -std=c++17 $(if $(GPU),-arch=native $(SPLIT),-arch=compute_80 -Xcicc -O1) -O1 -x cu -I. -Itests

# Here, too, those that do not look inside the companion link it: mixprec_cuda.o where there is a GPU.
GPU_OUTSIDE  := $(CUDA_OUTSIDE:%=$(BUILD)/gpu/%)
GPU_LINKED   := $(if $(GPU),$(BUILD)/mixprec_cuda.o,$(BUILD)/gpu/mixprec_cuda.o)
$(GPU_OUTSIDE): private GPU_FLAGS += -DCOMPANION_LINKED
$(GPU_OUTSIDE): $(GPU_LINKED)

$(BUILD)/gpu/mixprec_cuda.o: mixprec_cuda.cu mixprec.h
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(NVCC) $(GPU_FLAGS) -c $< -o $@

$(GPU_TESTS): $(BUILD)/gpu/%: tests/%.cpp $(LIB) mixprec_cuda.cu $(wildcard tests/*.h)
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(NVCC) $(GPU_FLAGS) -c $< -o $@.o
	$(Q)$(CXX) $@.o $(filter %.o,$^) $(LIB) $(OMP_LINK) $(CUDA_LIBS) -lm -o $@

# Programs for a GPU on the simulated one: the trainer and the bench.
$(BUILD)/cudasim.o: SIM_MORE = $(SANE)
$(BUILD)/cudasim.o $(BUILD)/cudasim_plain.o: mixprec_cuda.cu mixprec.h tests/cudasim.h tests/checked.h
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(SIM_FLAGS) $(SIM_MORE) -x c++ -c $< -o $@

SIM_LINK = $(CXX) -fsanitize=address,undefined $(filter %.o %.a,$^) $(OMP_LINK) -lm -o $@

$(BUILD)/tiny_gpt_sim.o: examples/tiny_gpt.c $(wildcard examples/*.h) $(BUILT)
	$(call say,cc $@)
	$(Q)$(CC) $(FLAGS) -DMIXPREC_IMPLEMENTATION_DONE -DTINY_GPT_CUDA -c $< -o $@

$(BUILD)/tiny_gpt_sim: $(BUILD)/tiny_gpt_sim.o $(BUILD)/cudasim.o $(LIB)
	$(call say,c++ $@)
	$(Q)$(SIM_LINK)

$(BUILD)/bench_cuda_sim.o: tests/bench/bench_cuda.cpp mixprec.h tests/cudasim.h
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(SIM_FLAGS) $(SANE) -c $< -o $@

$(BUILD)/bench_cuda_sim: $(BUILD)/bench_cuda_sim.o $(BUILD)/cudasim.o $(LIB)
	$(call say,c++ $@)
	$(Q)$(SIM_LINK)

# The bench of a GPU; it links where there is none, and then says so.
$(BUILD)/bench_cuda: tests/bench/bench_cuda.cpp $(BUILD)/mixprec_cuda.o $(LIB)
	$(call say,c++ $@)
	$(Q)$(CXX) -std=c++17 -Wall -Wextra $(if $(WERROR),-Werror) -O2 -isystem $(CUDA)/include -I. \
	    $< $(LIB) $(CUDA_LINK) $(OMP_LINK) -ldl -lm -o $@

$(LIB): $(BUILD)/mixprec.o
	$(Q)rm -f $@ && $(AR) rcs $@ $<

$(BUILD)/mixprec.o: mixprec.h tests/checked.h $(BUILD)/flags
	$(call say,cc $@)
	$(Q)printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n' >$(BUILD)/mixprec.c
	$(Q)$(CC) $(FLAGS) -c $(BUILD)/mixprec.c -o $@

# Rewritten only when the compiler or its flags changed: then everything is built again.
$(BUILD)/flags: always
	$(Q)mkdir -p $(BUILD)
	$(Q)echo '$(CC) $(FLAGS) $(LDFLAGS) $(LDLIBS)' | cmp -s - $@ || \
	    echo '$(CC) $(FLAGS) $(LDFLAGS) $(LDLIBS)' >$@

-include $(wildcard $(BUILD)/*.d $(BUILD)/bench/*.d)

# --- fuzzing: tests/fuzz, replayed by the tests, explored by make fuzz --------------------
FUZZ := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
FUZZ_SECONDS ?= 600
TESTS += $(FUZZ:%=$(BUILD)/%)

# Some compile the implementation again: unoptimised, that is soon done.
$(FUZZ:%=$(BUILD)/%): private light = -O0
$(FUZZ:%=$(BUILD)/%): $(BUILD)/%: tests/fuzz/%.c $(BUILT) ; $(link)

# Two that look at no internals share a copy that has its files in memory.
OF_FILES := $(filter %_load %_reader,$(FUZZ:%=$(BUILD)/%))
$(OF_FILES): $(BUILD)/memory_disk.o
$(OF_FILES): private LIB = $(BUILD)/memory_disk.o
$(OF_FILES): private done = -DMEMORY_DISK_LINKED
$(BUILD)/memory_disk.o: private light = -O0
$(BUILD)/memory_disk.o: tests/fuzz/memory_disk.h mixprec.h tests/checked.h $(BUILD)/flags
	$(call say,cc $@)
	$(Q)printf '#include "%s"\n' $< >$(BUILD)/memory_disk.c
	$(Q)$(CC) $(FLAGS) $(light) -DMEMORY_DISK_OBJECT -c $(BUILD)/memory_disk.c -o $@

$(FUZZ:%=$(BUILD)/%-explore): $(BUILD)/%-explore: tests/fuzz/%.c $(wildcard tests/fuzz/*.h) mixprec.h
	$(call say,clang $@)
	$(Q)mkdir -p $(@D) && clang -std=c99 -g -O1 -DFUZZ_EXPLORE -fsanitize=fuzzer,address,undefined \
	    -fno-sanitize-recover=all -I. -Itests $< -lm -o $@

# One after the other; what is found stays in BUILD/fuzz as crash-NAME..., to be given to BUILD/NAME.
.PHONY: fuzz
fuzz: $(FUZZ:%=$(BUILD)/%) $(FUZZ:%=$(BUILD)/%-explore)   ## look for inputs that break a promise (clang; FUZZ_SECONDS=600 for each)
	$(Q)for f in $(FUZZ); do mkdir -p $(BUILD)/fuzz/$$f && $(BUILD)/$$f --seeds $(BUILD)/fuzz/$$f && \
	    $(BUILD)/$$f-explore -max_total_time=$(FUZZ_SECONDS) -max_len=8192 -rss_limit_mb=4096 \
	        $$([ $$f = fuzz_options ] && echo -detect_leaks=0 -close_fd_mask=2) -print_final_stats=1 \
	        -artifact_prefix=$(BUILD)/fuzz/crash-$$f- $(BUILD)/fuzz/$$f || exit 1; done

# --- what can be made --------------------------------------------------------------------
.PHONY: always examples run report cuda coverage test test-long test-variants test-all test-gpu test-programs bench \
        bench-kernels bench-cuda ledger install uninstall clean help
always:

examples: $(EXAMPLES)    ## build the examples (the default)

# Threads that wait asleep cost a quiet machine little, and spare a busy one much.
run: $(BUILD)/tiny_gpt   ## train a small GPT in fp16 on mixprec.h, a minute or two; saved in BUILD/run
	OMP_WAIT_POLICY=passive $(BUILD)/tiny_gpt --dtype fp16 --data mixprec.h --steps 1800 --log-every 60 \
	    --eval-every 300 --out $(BUILD)/run --overwrite --sample 500

# A product that passes 65504 is planted in the middle of it.
report: $(BUILD)/tiny_gpt   ## the same, longer, with an overflow planted; BUILD/report/report.html shows it
	OMP_WAIT_POLICY=passive $(BUILD)/tiny_gpt --dtype fp16 --bias on --data mixprec.h --steps 3000 --log-every 20 \
	    --eval-every 250 --weight-decay 0 --plant 1200 --out $(BUILD)/report --overwrite
	@echo "open $(BUILD)/report/report.html"

# Every test command ends with the line `N passed, N failed, N skipped`; tests/run.sh sums.
SCRIPTS = $(wildcard tests/test_*.sh) tests/symbols.sh tests/layers.sh tests/metrics.sh tests/install.sh
# Those that take longest come first, so that what runs side by side ends side by side.
LONG_SCRIPTS = tests/test_tiny_gpt.sh tests/symbols.sh tests/test_cmake.sh tests/test_overflow.sh
EXPORT  = BUILD='$(BUILD)' CC='$(CC)' CXX='$(CXX)' OPENMP='$(OPENMP)' PYTHON='$(PYTHON)' \
          MAKE='$(MAKE)' CUDA='$(CUDA)' NVCC='$(NVCC)'
# Most of them use one core, and a compiler up to a gigabyte.
JOBS   ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); \
              m=$$(awk '/^MemAvailable/ { print int($$2 / 1500000) }' /proc/meminfo 2>/dev/null); \
              [ "$${m:=$$n}" -lt $$n ] && n=$$m; [ $$n -gt 4 ] && n=4; [ $$n -lt 1 ] && n=1; echo $$n)
# Without a -j of yours, the tests are built as many at a time.
ifneq ($(filter test test-long test-variants test-all coverage,$(MAKECMDGOALS)),)
  ifeq ($(filter -j% --jobserver%,$(MAKEFLAGS)),)
    MAKEFLAGS += -j$(JOBS)
  endif
endif
# Without a C++ compiler, or CUDA's headers, each of these programs is one skip.
CPP_RUN  = $(if $(CPP_TESTS),$(CPP_TESTS),'echo 0 passed, 0 failed, 1 skipped')
GPU_RUN  = $(if $(GPU_TESTS),$(GPU_TESTS),'echo 0 passed, 0 failed, $(words \
               $(filter-out tests/test_cudasim.cpp,$(wildcard tests/test_cuda*.cpp))) skipped')
CUDA_RUN = $(if $(CUDA_TESTS),$(1),'echo 0 passed, 0 failed, $(words \
               $(wildcard tests/test_cuda*.cpp)) skipped')

test: $(TESTS) $(CPP_TESTS) $(CUDA_TESTS) $(if $(GPU),$(GPU_TESTS)) $(EXAMPLES)   ## the tests: a few minutes, needs only cc and make
	$(Q)$(EXPORT) MIXPREC_TEST_QUICK=1 tests/run.sh -j $(JOBS) $(LONG_SCRIPTS) 'tests/compile_matrix.sh short' \
	    $(TESTS) $(CPP_RUN) $(call CUDA_RUN,$(CUDA_TESTS)) $(if $(GPU),$(GPU_RUN)) \
	    $(filter-out $(LONG_SCRIPTS),$(SCRIPTS))

SIM_PROGRAMS = $(if $(CUDA),$(BUILD)/tiny_gpt_sim $(BUILD)/bench_cuda_sim)
# Benches are built, that they keep up with the header.
BENCH_BUILDS = $(BENCHES) $(if $(shell command -v $(CXX)),$(BUILD)/bench/libpeers.so)

# Lines and branches of mixprec.h that the C tests reach, in a build of its own.
coverage:   ## what of mixprec.h the C tests reach (needs gcov; takes minutes)
	$(Q)$(EXPORT) tests/coverage.sh $(notdir $(TESTS))

# So that what runs side by side ends side by side.
LONGEST_FIRST = $(filter %_training,$(CUDA_SANE)) $(filter-out %_training,$(CUDA_SANE))

test-long: $(BUILD)/test_ranks $(BUILD)/test_gpt2 $(CUDA_SANE) $(SIM_PROGRAMS) $(BENCH_BUILDS) $(LONG) $(EXAMPLES)   ## what takes longer: sanitizers, exhaustive tests, simulated CUDA
	$(Q)$(EXPORT) tests/run.sh -t 1500 -j $(JOBS) tests/cuda_programs.sh 'ARCHS="75 90" tests/cuda_static.sh' \
	    $(LONG) $(call CUDA_RUN,$(LONGEST_FIRST)) 'tests/variant.sh arm' 'tests/variant.sh amx' tests/ranks_mpi.sh tests/ranks_nccl.sh \
	    'RANKS_KILLS=50 MIXPREC_TEST_ONLY=killed_rank $(BUILD)/test_ranks' tests/test_overflow.sh 'tests/mutation.sh -n' 'tests/mutation_c.sh -n' \
	    $(patsubst %,'$(PYTHON) %',$(wildcard tests/interop*.py))

# Too long for CI on two cores. tests/variant.sh lists them.
VARIANTS ?= ofast gnu finite sanitizers threads clang O0 O3 lto trapv char m32 gcc-11 clang-13 clang-16 musl tcc mingw \
            aarch64 armhf riscv64 ppc64le s390x
test-variants: $(GPU_TESTS) $(CUDA_FMA) $(EXAMPLES)   ## every compiler and flag, all planted faults, nvcc's link of the GPU tests
	$(Q)$(EXPORT) tests/run.sh -t 3000 'tests/compile_matrix.sh full' $(GPU_RUN) $(CUDA_FMA) \
	    tests/cuda_static.sh tests/mutation.sh tests/mutation_c.sh \
	    $(patsubst %,'tests/variant.sh %',$(VARIANTS))

test-all: test test-long test-variants   ## all three; an hour and more

test-gpu: $(GPU_TESTS)   ## the CUDA tests on the GPU that is there, then under compute-sanitizer (needs nvcc)
	$(Q)if [ -z '$(NVCC)' ]; then echo 'test-gpu: nvcc was not found; set CUDA=dir' >&2; exit 1; fi
	$(Q)$(EXPORT) tests/run.sh $(GPU_RUN)
	$(Q)$(EXPORT) tests/gpu_sanitizer.sh $(GPU_TESTS)

# The C tests alone, for another compiler or other flags (tests/variant.sh).
# LEFT: names of tests that a variant cannot have; each is one skip. EXE: what the compiler adds to names.
test-programs: $(TESTS)
	$(Q)tests/run.sh -t 900 -j $(JOBS) $(TESTS:%='$(RUNNER) %$(EXE)') \
	    $(LEFT:%=': % is left out; echo 0 passed, 0 failed, 1 skipped')

cuda: $(BUILD)/tiny_gpt_cuda   ## build mixprec_cuda.o and a trainer that can use a GPU (needs nvcc)

bench: $(BUILD)/bench/libpeers.so examples   ## mixprec beside the peers that are installed (takes minutes)
	$(Q)BUILD='$(BUILD)' PYTHON='$(PYTHON)' tests/bench/run.sh

bench-kernels: $(BENCHES)   ## the kernels of every instruction set, without peers (takes minutes)
	$(Q)for b in $(BENCHES); do echo "== $$b"; $$b || exit 1; done

bench-cuda:   ## measure the kernels and GPT-2 steps on a GPU (needs nvcc)
	$(Q)if [ -z '$(NVCC)' ]; then echo 'bench-cuda: nvcc was not found; set CUDA=dir' >&2; exit 1; fi
	$(Q)$(MAKE) --no-print-directory $(BUILD)/bench_cuda && $(BUILD)/bench_cuda $(BENCH_ARGS)

ledger: $(BUILD)/bench/ledger   ## what GPTs' steps would move, compute and keep on an H200: a model, no GPU needed
	$(Q)$(BUILD)/bench/ledger

install:   ## copy header, companion and mixprec.pc below DESTDIR/PREFIX
	install -d '$(DESTDIR)$(PREFIX)/include' '$(DESTDIR)$(PREFIX)/share/pkgconfig'
	install -m 644 mixprec.h '$(DESTDIR)$(PREFIX)/include/'
	@printf '%s\n' 'prefix=$(PREFIX)' 'includedir=$${prefix}/include' '' 'Name: mixprec' \
	    'Description: Automatic mixed-precision training for C, C++ and CUDA C' \
	    "Version: $$(awk -F '"' '/define MIXPREC_VERSION "/ { print $$2 }' mixprec.h)" \
	    'Cflags: -I$${includedir}' 'Libs: -lm' >'$(DESTDIR)$(PREFIX)/share/pkgconfig/mixprec.pc'
	@if [ -f mixprec_cuda.cu ]; then install -d '$(DESTDIR)$(PREFIX)/share/mixprec' && \
	    install -m 644 mixprec_cuda.cu '$(DESTDIR)$(PREFIX)/share/mixprec/'; fi

uninstall:   ## remove what install copied
	rm -f '$(DESTDIR)$(PREFIX)/include/mixprec.h' '$(DESTDIR)$(PREFIX)/share/pkgconfig/mixprec.pc'
	rm -rf '$(DESTDIR)$(PREFIX)/share/mixprec'

clean:   ## remove everything that was built
	rm -rf $(BUILD)

help:   ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
