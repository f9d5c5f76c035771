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
CUDA_ARCH ?= $(if $(GPU),-arch=native,-gencode arch=compute_80,code=sm_80 \
             -gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90)

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
docs/pytorch.md: src/pytorch_names.txt src/names.awk
	$(call say,pack $@)
	$(Q)awk -f src/names.awk src/pytorch_names.txt $@ >$@.$$$$ && mv $@.$$$$ $@ || { rm -f $@.$$$$; exit 1; }
$(HEADER) $(COMPANION): $(BUILD)/include/%: % 
	$(Q)mkdir -p $(@D)
	$(call pack,-v lines=1)

# --- how a program is built --------------------------------------------------------------
# The implementation compiles slowly, so it is compiled once, into an archive. In programs that
# define MIXPREC_IMPLEMENTATION, MIXPREC_IMPLEMENTATION_DONE leaves it out. OWN names the programs
# that compile their own implementation, for its options or for the system's calls. All builds check
# invariants.
Q     := $(if $(V),,@)
CHECKED  = -include tests/support/checked.h
INCLUDES = -I$(BUILD)/include -I. -Itests -Itests/support
FLAGS  = -std=$(STD) $(WARN) $(if $(WERROR),-Werror) $(INCLUDES) $(CHECKED) $(CPPFLAGS) $(CFLAGS) $(OPENMP)
LIB   := $(BUILD)/libmixprec.a
BUILT  = $(LIB) $(HEADER) $(BUILD)/flags
say    = $(if $(V),,@echo "  $(1)")

# HOST names those of them that compile only the host's part, and take the kernels from the library.
OWN    = test_checkpoint test_checkpoint_stdio test_threads test_amx test_cpuid test_block bench_optimizer
HOST   = test_checkpoint test_checkpoint_stdio test_threads test_block
AS_HOST = $(if $(PARTS),-DMIXPREC_PART=MIXPREC_HOST)
# tcc knows neither DEPENDS nor the builtins of tests/support/checked.h: tests/tools/variant.sh removes both.
DEPENDS = -MMD -MP -MT $@ -MF $@.dep
done   = $(if $(filter $(OWN),$(notdir $@)),$(if $(filter $(HOST),$(notdir $@)),$(AS_HOST)),-DMIXPREC_IMPLEMENTATION_DONE)

# `light` optimises a program less than the library. It follows CFLAGS, because make cannot append
# to a CFLAGS of the command line. Most tests only call the compiled library: they take -O1 unless CFLAGS is
# given, and tests/tools/variant.sh saves more time with LIGHT=-O0. INLINE names the tests of the header's inline functions, which a program
# compiles itself.
LIGHT  ?= $(if $(filter file,$(origin CFLAGS)),-O1)
INLINE  = test_formats test_bits test_numerics test_functions
light   = $(if $(filter $(INLINE),$(notdir $@)),,$(if $(filter $(BUILD)/test_%,$@),$(LIGHT)))

define link
$(call say,cc $@)
$(Q)mkdir -p $(@D)
$(Q)$(CC) $(FLAGS) $(light) $(done) $(DEPENDS) $< $(LIB) $(LDFLAGS) $(LDLIBS) -lm -o $@
endef

# The programs that compile their own implementation need no speed.
$(OWN:%=$(BUILD)/%): private light = -O0
$(BUILD)/test_threads $(BUILD)/test_ranks_refused $(BUILD)/test_ranks_threads $(BUILD)/test_ranks_buffers $(BUILD)/test_ranks_state: private LDLIBS += -pthread

# Tests that look inside the library compile only the functions that they call (tests/support/internals.h).
$(BUILD)/test_optimizers $(BUILD)/test_pairs $(BUILD)/test_guard_traits: private light = -O1 -fno-inline

EXAMPLES := $(patsubst examples/%.c,$(BUILD)/%,$(filter-out %_fork.c %_mpi.c %_nccl.c %_tcp.c %_threads.c,$(wildcard examples/*.c examples/amp/*.c))) $(BUILD)/trainer
# A test is found in every folder of tests/ and in tests/ itself; build/test_x is built from the test_x.c of
# any folder, so two folders cannot have a test of the same name.
tests_like = $(wildcard tests/$1 tests/*/$1)
SOURCES  := $(call tests_like,test_*.c) $(call tests_like,long_*.c) $(call tests_like,test_*.cpp)
TWICE    := $(strip $(foreach n,$(sort $(basename $(notdir $(SOURCES)))),$(word 2,$(filter %/$n.c %/$n.cpp,$(SOURCES)))))
$(if $(TWICE),$(error two tests have one name: $(TWICE)))
program    = $(addprefix $(BUILD)/,$(basename $(notdir $(call tests_like,$1))))
TEST_DIRS := $(sort $(dir $(SOURCES)))
vpath test_%.c $(TEST_DIRS)
vpath long_%.c $(TEST_DIRS)
vpath test_%.cpp $(TEST_DIRS)
TESTS    := $(call program,test_*.c)
LONG     := $(call program,long_*.c)
BENCHES  := $(patsubst tests/bench/%.c,$(BUILD)/bench/%,$(wildcard tests/bench/*.c))

$(BUILD)/%: examples/%.c $(BUILT)   ; $(link)
$(BUILD)/trainer: examples/trainer/trainer.c $(BUILT) ; $(link)
$(BUILD)/%: %.c $(BUILT)          ; $(link)
# Tests that compile all of mixprec.h need not wait for the library.
OWN_TESTS := $(patsubst %,$(BUILD)/%,$(filter test_%,$(filter-out $(HOST),$(OWN))))
$(OWN_TESTS): private LIB =
$(OWN_TESTS): $(BUILD)/%: %.c $(HEADER) $(BUILD)/flags ; $(link)
$(BUILD)/bench/%: tests/bench/%.c $(BUILT) ; $(link) -lpthread
# Models with a planted overflow and with lost gradients, which tests/programs/test_overflow.sh runs.
PLANTED  := $(BUILD)/overflow $(BUILD)/underflow
$(PLANTED): $(BUILD)/%: tests/programs/%.c $(BUILT) ; $(link)

# The header's features for C++ only.
CPP_TESTS := $(if $(shell command -v $(CXX)),$(BUILD)/test_scopes)
$(BUILD)/test_scopes: tests/core/test_scopes.cpp $(BUILT) tests/support/test.h
	$(call say,c++ $@)
	$(Q)$(CXX) -std=c++11 $(filter-out -Wstrict-prototypes,$(WARN)) $(if $(WERROR),-Werror) -O1 $(INCLUDES) \
	    $< $(LIB) $(OMP_LINK) -lm -o $@

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

# The trainer is built with CUDA if this machine has a GPU; trainer_cuda is always built with CUDA. A program's own
# variables are private: its prerequisites, BUILD/flags among them, must not see them.
CUDA_LIBS = -L$(CUDA)/lib64 -L$(CUDA)/lib -Wl,-rpath,$(CUDA)/lib64 -lcublasLt -lcudart
CUDA_LINK = $(BUILD)/mixprec_cuda.o $(CUDA_LIBS) -lstdc++
ifneq ($(GPU),)
$(BUILD)/trainer: $(BUILD)/mixprec_cuda.o
$(BUILD)/trainer: private done += -DTRAINER_CUDA
$(BUILD)/trainer: private LDLIBS += $(CUDA_LINK)
endif
$(BUILD)/trainer_cuda: private done += -DTRAINER_CUDA
$(BUILD)/trainer_cuda: private LDLIBS += $(CUDA_LINK)
$(BUILD)/trainer_cuda: examples/trainer/trainer.c $(BUILT) $(BUILD)/mixprec_cuda.o ; $(link)

# With a GPU, compiling should be fast: newer versions of nvcc use all cores for one file.
SPLIT := $(if $(GPU),$(shell $(NVCC) --help 2>/dev/null | grep -q -e '--split-compile ' && \
             echo --split-compile=0))
$(BUILD)/mixprec_cuda.o: $(COMPANION) $(HEADER)
	$(call say,nvcc $@$(if $(GPU),,: three to four minutes of a core. CUDA_ARCH=-arch=sm_90 compiles for one GPU only))
	$(Q)mkdir -p $(@D) && $(NVCC) -std=c++17 -O3 $(SPLIT) $(CUDA_ARCH) -I. -c $< -o $@

# A C++ compiler compiles the companion for a simulated GPU: plain for the quick tests, and for the
# long tests with the sanitizers, which take three times as long. The simulation's own tests check
# the sanitizers' messages, so they always use the sanitizers.
CUDA_SANE  := $(if $(CUDA),$(patsubst $(BUILD)/%,$(BUILD)/sane/%,$(call program,test_cuda*.cpp)))
CUDA_PLAIN := $(patsubst $(BUILD)/sane/%,$(BUILD)/%,$(filter-out %/test_cudasim,$(CUDA_SANE)))
CUDA_TESTS := $(strip $(CUDA_PLAIN) $(filter %/test_cudasim,$(CUDA_SANE)))
SANE        = -g1 -fsanitize=address,undefined -fno-sanitize-recover=all
$(BUILD)/sane/test_cudasim: private SANE += -O0
SIM_FLAGS   = -std=c++17 $(CHECKED) -Wall -Wextra $(if $(WERROR),-Werror) -O1 -DMIXPREC_CUDASIM \
              -fno-strict-aliasing -ffp-contract=off -isystem $(CUDA)/include $(INCLUDES)

# mixprec_cuda.cu takes most of the time. It is compiled once, together with the functions by which
# a few tests look inside it (tests/cuda/inside.h), and all CUDA tests link that object.
SIM_LINKED := $(filter-out %/test_cudasim,$(CUDA_PLAIN) $(CUDA_SANE))
$(SIM_LINKED): private SIM_FLAGS += -DCOMPANION_LINKED
$(addsuffix /test_cuda_by_hand,$(BUILD) $(BUILD)/sane $(BUILD)/gpu): examples/by_hand_cuda.cu
$(foreach t,everyday everyday_recipes,$(addsuffix /test_cuda_$t,$(BUILD) $(BUILD)/sane $(BUILD)/gpu)): \
    $(wildcard tests/programs/*.h) tests/cuda/test_cuda_everyday.cpp
$(CUDA_PLAIN): $(BUILD)/cudasim_plain.o
$(CUDA_PLAIN) $(BUILD)/simulated.h.gch: private SIM_FLAGS += -O0
$(filter-out %/test_cudasim,$(CUDA_SANE)): $(BUILD)/cudasim.o $(LIB)

# Most of a plain CUDA test is headers: they are compiled once. test_cuda_by_hand defines macros before its headers.
# gcc warns of unused functions of a header only if the header is precompiled.
WITH_HEADERS := $(filter-out %/test_cuda_by_hand,$(CUDA_PLAIN))
$(WITH_HEADERS): $(BUILD)/simulated.h.gch
$(WITH_HEADERS): private HEADERS = -include $(BUILD)/simulated.h
$(WITH_HEADERS): private SIM_FLAGS += -Wno-unused-function

$(BUILD)/simulated.h.gch: $(wildcard tests/support/*.h) tests/cuda/inside.h $(HEADER) $(BUILD)/flags
	$(call say,c++ $@)
	$(Q)printf '#include "support/checked.h"\n#include "companion.h"\n' >$(BUILD)/simulated.h
	$(Q)$(CXX) $(SIM_FLAGS) $(filter -f%,$(OMP_LINK)) -DCOMPANION_LINKED -x c++-header $(BUILD)/simulated.h -o $@

$(CUDA_PLAIN): $(BUILD)/%: %.cpp $(LIB) $(COMPANION) $(wildcard tests/support/*.h)
	$(call say,c++ $@)
	$(Q)$(CXX) $(HEADERS) $(SIM_FLAGS) $< $(filter %.o,$^) $(LIB) $(OMP_LINK) -lm -o $@

$(CUDA_SANE): $(BUILD)/sane/%: %.cpp $(HEADER) $(COMPANION) $(wildcard tests/support/*.h)
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(SIM_FLAGS) $(SANE) $< $(filter %.o,$^) $(filter %.a,$^) $(OMP_LINK) -lm -o $@

# With fused multiply-adds, as nvcc generates them, and with the single NaN of a GPU's arithmetic:
# every promise of equal bits must still hold. It needs gcc, which can reserve two registers.
CUDA_FMA := $(if $(and $(CUDA),$(filter x86_64,$(shell uname -m)),$(if $(findstring clang,$(CXX)),,1)), \
                $(BUILD)/fma/test_cuda $(BUILD)/fma/test_cuda_optimizers $(BUILD)/fma/test_cuda_states)

ONE_NAN = -mfma -ffp-contract=fast -ffixed-xmm14 -ffixed-xmm15 -DCUDASIM_ONE_NAN

$(CUDA_FMA): $(BUILD)/fma/%: %.cpp tests/cuda/inside.cu tests/cuda/canonical_nan.awk $(LIB) $(COMPANION) $(wildcard tests/support/*.h)
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(SIM_FLAGS) $(ONE_NAN) -S $< -o $@.raw.s
	$(Q)awk -f tests/cuda/canonical_nan.awk $@.raw.s >$@.s && rm -f $@.raw.s
	$(Q)$(CXX) $@.s $(LIB) $(OMP_LINK) -lm -o $@

# The same tests for the GPU of this machine. Without a GPU the build only checks that they link,
# and skips the assembly.
GPU_TESTS := $(if $(NVCC),$(patsubst $(BUILD)/%,$(BUILD)/gpu/%,$(filter-out \
                 %/test_cudasim,$(call program,test_cuda*.cpp))))
GPU_FLAGS  = -std=c++17 $(if $(GPU),-arch=native $(SPLIT),-arch=compute_80 -Xcicc -O1) -O1 -x cu $(INCLUDES)

$(BUILD)/gpu/inside.o: tests/cuda/inside.cu tests/cuda/inside.h $(COMPANION) $(HEADER)
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(NVCC) $(GPU_FLAGS) -c $< -o $@

$(GPU_TESTS): $(BUILD)/gpu/%: %.cpp $(BUILD)/gpu/inside.o $(LIB) $(wildcard tests/support/*.h)
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(NVCC) $(GPU_FLAGS) -DCOMPANION_LINKED -c $< -o $@.o
	$(Q)$(CXX) $@.o $(filter %.o,$^) $(LIB) $(OMP_LINK) $(CUDA_LIBS) -lm -o $@

# The same programs without a GPU: tests/cuda/runtime.cpp replaces libcudart and interprets the PTX
# that nvcc generated. The few kernels of a test itself are compiled once, for 7.5: newer GPUs run
# them.
PTX_ARCHS ?= 75 80 90
PTX_NAMES := $(if $(NVCC),$(notdir $(CUDA_PLAIN)))
# Only GPUs of 10.0 and newer run all kernels of narrow products.
PTX_NEWEST := $(if $(NVCC),$(shell $(NVCC) --list-gpu-code 2>/dev/null | sed -n 's/^sm_100$$/100/p'))
PTX_TESTS := $(foreach a,$(PTX_ARCHS),$(PTX_NAMES:%=$(BUILD)/ptx/sm_$a/%)) \
             $(PTX_NEWEST:%=$(BUILD)/ptx/sm_%/test_cuda_narrow)
PTX_FLAGS  = -std=c++17 --no-compress -x cu $(INCLUDES)
ptx_for    = -gencode arch=compute_$1,code=compute_$1

$(BUILD)/ptx/runtime.o: tests/cuda/runtime.cpp $(wildcard tests/cuda/*.h) $(wildcard tests/support/cudasim*.h)
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) -std=c++17 -Wall -Wextra $(if $(WERROR),-Werror) -O2 -fwrapv -frounding-math \
	    -ffp-contract=off -fno-strict-aliasing -isystem $(CUDA)/include -Itests -Itests/support -c $< -o $@

$(BUILD)/ptx/inside_%.o: tests/cuda/inside.cu tests/cuda/inside.h $(COMPANION) $(HEADER)
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(NVCC) $(PTX_FLAGS) -O3 $(call ptx_for,$*) -c $< -o $@

$(PTX_NAMES:%=$(BUILD)/ptx/%.o): $(BUILD)/ptx/%.o: %.cpp $(HEADER) $(wildcard tests/support/*.h)
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(NVCC) $(PTX_FLAGS) -O1 -DCOMPANION_LINKED $(call ptx_for,75) -c $< -o $@

define ptx_link
$(PTX_NAMES:%=$(BUILD)/ptx/sm_$1/%): $(BUILD)/ptx/sm_$1/%: $(BUILD)/ptx/%.o $(BUILD)/ptx/inside_$1.o \
        $(BUILD)/ptx/runtime.o $(LIB)
	$(Q)mkdir -p $$(@D) && $(CXX) $$^ $$(OMP_LINK) -lm -o $$@
endef
$(foreach a,$(sort $(PTX_ARCHS) $(PTX_NEWEST)),$(eval $(call ptx_link,$a)))

# Kernels with one fault each: does the interpreter report it?
PTX_FAULTS := $(if $(NVCC),$(BUILD)/ptx/ptx_faults)
$(BUILD)/ptx/ptx_faults: tests/cuda/ptx_faults.cu $(BUILD)/ptx/runtime.o
	$(call say,nvcc $@)
	$(Q)$(NVCC) $(PTX_FLAGS) -O1 $(call ptx_for,80) -c $< -o $@.o
	$(Q)$(CXX) $@.o $(BUILD)/ptx/runtime.o -lm -o $@

# Programs for a GPU on the simulated one: the trainer and the bench.
$(BUILD)/cudasim.o: private SIM_MORE = $(SANE)
# The quick tests run four times as long as this compiles: -O2 saves a fifth of that.
$(BUILD)/cudasim_plain.o: private SIM_MORE = -O2
$(BUILD)/cudasim.o $(BUILD)/cudasim_plain.o: tests/cuda/inside.cu tests/cuda/inside.h $(COMPANION) $(HEADER) \
        $(wildcard tests/support/cudasim*.h) tests/support/checked.h
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(SIM_FLAGS) $(SIM_MORE) -x c++ -c $< -o $@

SIM_LINK = $(CXX) -fsanitize=address,undefined $(filter %.o %.a,$^) $(OMP_LINK) -lm -o $@

$(BUILD)/trainer_sim.o: examples/trainer/trainer.c $(wildcard examples/*.h examples/trainer/*.h) $(BUILT)
	$(call say,cc $@)
	$(Q)$(CC) $(FLAGS) -DMIXPREC_IMPLEMENTATION_DONE -DTRAINER_CUDA -c $< -o $@

$(BUILD)/trainer_sim: $(BUILD)/trainer_sim.o $(BUILD)/cudasim.o $(LIB)
	$(call say,c++ $@)
	$(Q)$(SIM_LINK)

$(BUILD)/bench_cuda_sim.o: tests/bench/bench_cuda.cpp tests/support/ledger.h $(HEADER) $(wildcard tests/support/cudasim*.h)
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(SIM_FLAGS) $(SANE) -c $< -o $@

$(BUILD)/bench_cuda_sim: $(BUILD)/bench_cuda_sim.o $(BUILD)/cudasim.o $(LIB)
	$(call say,c++ $@)
	$(Q)$(SIM_LINK)

# The bench for a GPU. Without a GPU it still links, and reports that there is none.
$(BUILD)/bench_cuda: tests/bench/bench_cuda.cpp tests/support/ledger.h $(BUILD)/mixprec_cuda.o $(LIB)
	$(call say,c++ $@)
	$(Q)$(CXX) -std=c++17 -Wall -Wextra $(if $(WERROR),-Werror) -O2 -isystem $(CUDA)/include -I. \
	    $< $(LIB) $(CUDA_LINK) $(OMP_LINK) -ldl -lm -o $@

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

# --- fuzzing: tests/fuzz, replayed by the tests, explored by make fuzz --------------------
FUZZ := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
FUZZ_SECONDS ?= 600
TESTS += $(FUZZ:%=$(BUILD)/%)

# Some compile functions of the implementation again, unoptimised because that is fast.
$(FUZZ:%=$(BUILD)/%): private light = -O0
$(FUZZ:%=$(BUILD)/%): $(BUILD)/%: tests/fuzz/%.c $(BUILT) ; $(link)

# Two that use no internals share a library whose files are in memory.
OF_FILES := $(filter %_load %_reader,$(FUZZ:%=$(BUILD)/%))
$(OF_FILES): $(BUILD)/memory_disk.o
$(OF_FILES): private LIB = $(BUILD)/memory_disk.o $(BUILD)/libmixprec.a
$(OF_FILES): private done = -DMEMORY_DISK_LINKED
$(BUILD)/memory_disk.o: private light = -O0
$(BUILD)/memory_disk.o: tests/fuzz/memory_disk.h $(HEADER) tests/support/checked.h $(BUILD)/flags
	$(call say,cc $@)
	$(Q)printf '#include "%s"\n' $< >$(BUILD)/memory_disk.c
	$(Q)$(CC) $(FLAGS) $(light) -DMEMORY_DISK_OBJECT $(AS_HOST) -c $(BUILD)/memory_disk.c -o $@

$(FUZZ:%=$(BUILD)/%-explore): $(BUILD)/%-explore: tests/fuzz/%.c $(wildcard tests/fuzz/*.h) mixprec.h
	$(call say,clang $@)
	$(Q)mkdir -p $(@D) && clang -std=c99 -g -O1 -DFUZZ_EXPLORE -DMIXPREC_IMPLEMENTATION= -fsanitize=fuzzer,address,undefined \
	    -fno-sanitize-recover=all -I. -Itests -Itests/support $< -lm -o $@

# One after the other. Findings stay in BUILD/fuzz as crash-NAME...; pass such a file to BUILD/NAME.
.PHONY: fuzz
fuzz: $(FUZZ:%=$(BUILD)/%) $(FUZZ:%=$(BUILD)/%-explore)   ## look for inputs that break a promise (clang; FUZZ_SECONDS=600 for each)
	$(Q)for f in $(FUZZ); do mkdir -p $(BUILD)/fuzz/$$f && $(BUILD)/$$f --seeds $(BUILD)/fuzz/$$f && \
	    $(BUILD)/$$f-explore -max_total_time=$(FUZZ_SECONDS) -max_len=8192 -rss_limit_mb=4096 \
	        $$([ $$f = fuzz_options ] && echo -detect_leaks=0 -close_fd_mask=2) -print_final_stats=1 \
	        -artifact_prefix=$(BUILD)/fuzz/crash-$$f- $(BUILD)/fuzz/$$f || exit 1; done

# --- what can be made --------------------------------------------------------------------
.PHONY: always pack examples run report show web cuda shared coverage test test-long test-variants test-all test-gpu test-programs bench \
        bench-small bench-conv bench-kernels bench-cuda ledger install uninstall dist dist-files reference clean help
always:

examples: $(EXAMPLES)    ## build the examples (the default)

pack: mixprec.h mixprec_cuda.cu docs/pytorch.md   ## pack the rooms under src/ into mixprec.h and mixprec_cuda.cu

run: $(BUILD)/tiny_gpt   ## train a small GPT in fp16 on mixprec.h, about a minute; BUILD/run/report.html
	@mkdir -p $(BUILD)/run
	$(BUILD)/tiny_gpt fp16 mixprec.h 1500 $(BUILD)/run

report: $(BUILD)/trainer   ## the trainer's run, longer; BUILD/report/report.html draws loss, scale, gradients
	$(BUILD)/trainer --dtype fp16 --data mixprec.h --steps 3000 --log-every 20 \
	    --eval-every 250 --out $(BUILD)/report --overwrite
	@echo "open $(BUILD)/report/report.html"

# SEEDS, BATCH_SEEDS and TEXT: see the script. It compares with PyTorch if PYTHON has PyTorch.
show: $(BUILD)/proof $(BUILD)/trainer   ## what fp16 loses in four models, and what brings it back: BUILD/show/show.html
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

# Every test command ends with the line `N passed, N failed, N skipped`; tests/tools/run.sh sums.
SCRIPTS = $(call tests_like,test_*.sh) tests/tools/symbols.sh tests/tools/rooms.sh tests/tools/metrics.sh tests/tools/install.sh
# The longest tests come first, so that parallel tests end at about the same time.
LONG_SCRIPTS = tests/trainer/test_trainer.sh tests/tools/test_left_out.sh tests/tools/rooms.sh tests/tools/symbols.sh tests/tools/test_cmake.sh tests/programs/test_overflow.sh
# A test that mostly waits for dead ranks: it starts first, so that other tests compute meanwhile.
SLEEPER = $(BUILD)/test_ranks_apart
EXPORT  = BUILD='$(BUILD)' CC='$(CC)' CXX='$(CXX)' OPENMP='$(OPENMP)' PYTHON='$(PYTHON)' \
          MAKE='$(MAKE)' CUDA='$(CUDA)' NVCC='$(NVCC)'
# Most tests use one core; a compiler uses up to a gigabyte.
JOBS   ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); \
              m=$$(awk '/^MemAvailable/ { print int($$2 / 1500000) }' /proc/meminfo 2>/dev/null); \
              [ "$${m:=$$n}" -lt $$n ] && n=$$m; [ $$n -gt 4 ] && n=4; [ $$n -lt 1 ] && n=1; echo $$n)
# Without -j, make builds as many tests at a time as run at a time.
ifneq ($(filter test test-long test-variants test-all coverage,$(MAKECMDGOALS)),)
  ifeq ($(filter -j% --jobserver%,$(MAKEFLAGS)),)
    MAKEFLAGS += -j$(JOBS)
  endif
endif
# Some tests sleep, until a rank's patience ends or a hang is found: one test more runs than there are cores.
RUN_JOBS = $(if $(filter file,$(origin JOBS)),$(shell echo $$(($(JOBS) + 1))),$(JOBS))
# Without a C++ compiler or CUDA's headers, each of these programs counts as one skip.
CPP_RUN  = $(if $(CPP_TESTS),$(CPP_TESTS),'echo 0 passed, 0 failed, 1 skipped')
GPU_RUN  = $(if $(GPU_TESTS),$(GPU_TESTS),'echo 0 passed, 0 failed, $(words \
               $(filter-out %/test_cudasim,$(call program,test_cuda*.cpp))) skipped')
CUDA_RUN = $(if $(CUDA_TESTS),$(1),'echo 0 passed, 0 failed, $(words \
               $(call program,test_cuda*.cpp)) skipped')

# The two longest compilations come first, so that no core waits for them.
test: $(LIB) $(if $(CUDA_TESTS),$(BUILD)/cudasim_plain.o) $(TESTS) $(CPP_TESTS) $(CUDA_TESTS) $(if $(GPU),$(GPU_TESTS)) $(PLANTED) $(EXAMPLES)   ## the tests: a few minutes, needs only cc and make
	$(Q)$(EXPORT) MIXPREC_TEST_QUICK=1 tests/tools/run.sh -j $(RUN_JOBS) $(SLEEPER) $(LONG_SCRIPTS) 'tests/tools/compile_matrix.sh short' \
	    $(filter-out $(SLEEPER),$(TESTS)) $(CPP_RUN) $(call CUDA_RUN,$(CUDA_TESTS)) $(if $(GPU),$(GPU_RUN)) \
	    $(filter-out $(LONG_SCRIPTS),$(SCRIPTS))

SIM_PROGRAMS = $(if $(CUDA),$(BUILD)/trainer_sim $(BUILD)/bench_cuda_sim)
# Benches are built to check that they still compile with the header.
BENCH_BUILDS = $(BENCHES) $(if $(shell command -v $(CXX)),$(BUILD)/bench/libpeers.so $(BUILD)/bench/libsmall.so $(BUILD)/bench/libconv.so)

# Lines and branches of mixprec.h that the C tests reach, in a build of its own.
coverage:   ## what of mixprec.h the C tests reach (needs gcov; takes minutes)
	$(Q)$(EXPORT) tests/tools/coverage.sh $(notdir $(TESTS))

# The order lets parallel tests end at about the same time.
LONGEST_FIRST = $(filter %_training,$(CUDA_SANE)) $(filter-out %_training,$(CUDA_SANE))

test-long: $(BUILD)/test_ranks $(BUILD)/test_refused $(BUILD)/test_ranks_refused $(BUILD)/test_gpt2 $(CUDA_SANE) $(PTX_TESTS) $(PTX_FAULTS) $(SIM_PROGRAMS) $(BENCH_BUILDS) $(LONG) $(PLANTED) $(EXAMPLES)   ## what takes longer: sanitizers, exhaustive tests, simulated CUDA
	$(Q)$(EXPORT) tests/tools/run.sh -t 1500 -j $(JOBS) 'PTX_ARCHS="$(PTX_ARCHS)" tests/cuda/ptx.sh' tests/cuda/cuda_programs.sh 'ARCHS="75 90" tests/cuda/cuda_static.sh' \
	    $(LONG) $(call CUDA_RUN,$(LONGEST_FIRST)) 'tests/tools/variant.sh arm' 'tests/tools/variant.sh amx' tests/ranks/ranks_mpi.sh tests/ranks/ranks_nccl.sh \
	    'RANKS_KILLS=50 MIXPREC_TEST_ONLY=killed_rank $(BUILD)/test_ranks' $(BUILD)/test_refused $(BUILD)/test_ranks_refused \
	    tests/tools/rooms.sh tests/tools/format.sh tests/tools/test_left_out.sh tests/programs/test_overflow.sh tests/programs/test_real_data.sh 'tests/tools/compile_matrix.sh languages' 'tests/tools/mutation.sh -n' 'tests/tools/mutation_c.sh -n' \
	    tests/tools/test_packages.sh tests/tools/test_parts.sh tests/tools/test_shared.sh tests/tools/test_workflows.sh tests/tools/install.sh tests/tools/test_reference_page.sh tests/programs/test_web.sh tests/programs/test_docs.sh \
	    $(patsubst %,'$(PYTHON) %',$(call tests_like,interop*.py))

# Too long for CI on two cores. tests/tools/variant.sh lists them.
VARIANTS ?= no_ranks no_watch no_checkpoint ofast gnu finite sanitizers threads clang O0 O3 lto trapv char m32 gcc-11 clang-13 clang-16 musl tcc mingw clang_cl \
            aarch64 armhf riscv64 ppc64le s390x
test-ptx: $(PTX_TESTS) $(PTX_FAULTS)   ## nvcc's own code, interpreted: the GPU tests without a GPU (needs nvcc)
	$(Q)$(EXPORT) tests/tools/run.sh -t 1500 'PTX_ARCHS="$(PTX_ARCHS)" tests/cuda/ptx.sh'

test-variants: $(GPU_TESTS) $(CUDA_FMA) $(PTX_TESTS) $(EXAMPLES)   ## every compiler and flag, all planted faults, nvcc's link of the GPU tests
	$(Q)$(EXPORT) tests/tools/run.sh -t 3000 'tests/tools/compile_matrix.sh full' $(GPU_RUN) $(CUDA_FMA) \
	    tests/cuda/cuda_static.sh tests/tools/mutation.sh tests/tools/mutation_c.sh tests/cuda/ptx_plants.sh tests/tools/cortex_m.sh \
	    $(patsubst %,'tests/tools/variant.sh %',$(VARIANTS))

test-all: test test-long test-variants   ## test, test-long and test-variants; an hour and more

test-gpu: $(GPU_TESTS)   ## the CUDA tests on the GPU that is there, then under compute-sanitizer (needs nvcc)
	$(Q)if [ -z '$(NVCC)' ]; then echo 'test-gpu: nvcc was not found; set CUDA=dir' >&2; exit 1; fi
	$(Q)$(EXPORT) tests/tools/run.sh $(GPU_RUN)
	$(Q)$(EXPORT) tests/cuda/gpu_sanitizer.sh $(GPU_TESTS)

# Only the C tests, for another compiler or other flags (tests/tools/variant.sh).
# LEFT: names of tests that a variant cannot build; each is one skip. EXE: the suffix of programs.
test-programs: $(TESTS)
	$(Q)tests/tools/run.sh -t 900 -j $(JOBS) $(TESTS:%='$(RUNNER) %$(EXE)') \
	    $(LEFT:%=': % is left out; echo 0 passed, 0 failed, 1 skipped')

cuda:   ## build mixprec_cuda.o and a trainer that can use a GPU (needs nvcc)
	$(Q)if [ -z '$(NVCC)' ]; then echo 'cuda: nvcc was not found; set CUDA=dir' >&2; exit 1; fi
	$(Q)$(MAKE) --no-print-directory $(BUILD)/trainer_cuda

bench: $(BUILD)/bench/libpeers.so examples   ## mixprec beside the peers that are installed (takes minutes)
	$(Q)BUILD='$(BUILD)' PYTHON='$(PYTHON)' tests/bench/run.sh

bench-small: $(BUILD)/bench/libsmall.so   ## a small network's step beside PyTorch's, turn by turn
	$(Q)$(PYTHON) tests/bench/small.py $(BUILD)/bench/libsmall.so

bench-conv: $(BUILD)/bench/libconv.so   ## conv2d of examples/conv.h beside PyTorch's, turn by turn
	$(Q)$(PYTHON) tests/bench/conv.py $(BUILD)/bench/libconv.so

bench-kernels: $(BENCHES)   ## the kernels of every instruction set, without peers (takes minutes)
	$(Q)for b in $(BENCHES); do echo "== $$b"; $$b || exit 1; done

bench-cuda:   ## measure the kernels and GPT-2 steps on a GPU (needs nvcc)
	$(Q)if [ -z '$(NVCC)' ]; then echo 'bench-cuda: nvcc was not found; set CUDA=dir' >&2; exit 1; fi
	$(Q)$(MAKE) --no-print-directory $(BUILD)/bench_cuda && $(BUILD)/bench_cuda $(BENCH_ARGS)

ledger: $(BUILD)/bench/ledger   ## what GPTs' steps would move, compute and keep on five GPUs (a model)
	$(Q)$(BUILD)/bench/ledger

# What users include, and what they compile: see docs/embedding.md.
ADDONS  = compare conv recurrent report
SOURCED = mixprec_cuda.cu LICENSE $(wildcard src/parts/*.c)
install:   ## copy the header, its parts, add-ons, companion, licence and mixprec.pc below DESTDIR/PREFIX
	install -d '$(DESTDIR)$(PREFIX)/include/mixprec' '$(DESTDIR)$(PREFIX)/share/pkgconfig' '$(DESTDIR)$(PREFIX)/share/mixprec'
	install -m 644 mixprec.h '$(DESTDIR)$(PREFIX)/include/'
	install -m 644 $(ADDONS:%=examples/%.h) '$(DESTDIR)$(PREFIX)/include/mixprec/'
	install -m 644 $(SOURCED) '$(DESTDIR)$(PREFIX)/share/mixprec/'
	@printf '%s\n' 'prefix=$(PREFIX)' 'includedir=$${prefix}/include' 'sources=$${prefix}/share/mixprec' '' 'Name: mixprec' \
	    'Description: Automatic mixed-precision training for C, C++ and CUDA C. Define MIXPREC_IMPLEMENTATION before the include in one source file of your program, or compile the five files mixprec_*.c of the variable sources' \
	    'Version: $(VERSION)' 'Cflags: -I$${includedir}' 'Libs: -lm' >'$(DESTDIR)$(PREFIX)/share/pkgconfig/mixprec.pc'

uninstall:   ## remove what install copied
	rm -f '$(DESTDIR)$(PREFIX)/include/mixprec.h' '$(DESTDIR)$(PREFIX)/share/pkgconfig/mixprec.pc'
	rm -rf '$(DESTDIR)$(PREFIX)/share/mixprec' '$(DESTDIR)$(PREFIX)/include/mixprec'

# A shared library, for other languages. It exports what starts with mixp_: also the inline functions, from an object
# of their own. libmixprec.cdef has the declarations that Python's cffi reads. Before 1.0 each minor version has a
# SONAME of its own.
SHARED   = $(BUILD)/shared
SONAME   = libmixprec.so.$(basename $(VERSION))
RELEASED = $(CC) -std=$(STD) $(WARN) $(CPPFLAGS) $(CFLAGS) $(OPENMP) -fPIC -I.
ifeq ($(shell uname -s),Darwin)
  SONAME  = libmixprec.$(basename $(VERSION)).dylib
  EXPORTS = -dynamiclib -Wl,-install_name,@rpath/$(SONAME) -Wl,-exported_symbol,'_mixp_*'
else
  EXPORTS = -shared -Wl,-soname,$(SONAME) -Wl,--version-script,$(SHARED)/exports
endif
RELEASE_OBJECTS = $(patsubst src/parts/%.c,$(SHARED)/%.o,$(wildcard src/parts/*.c))
shared: $(SHARED)/$(SONAME) $(SHARED)/libmixprec.cdef   ## BUILD/shared: a shared library, and its declarations for cffi (examples/from_python.py)
$(RELEASE_OBJECTS): $(SHARED)/%.o: src/parts/%.c mixprec.h $(BUILD)/flags
	$(call say,cc $@)
	$(Q)mkdir -p $(@D) && $(RELEASED) -c $< -o $@
$(SHARED)/inline.o: mixprec.h $(BUILD)/flags
	$(call say,cc $@)
	$(Q)mkdir -p $(@D) && printf '#define MIXPREC_HD extern\n#include "mixprec.h"\n' >$(SHARED)/inline.c
	$(Q)$(RELEASED) -c $(SHARED)/inline.c -o $@
$(SHARED)/$(SONAME): $(RELEASE_OBJECTS) $(SHARED)/inline.o
	$(call say,cc $@)
	$(Q)echo '{ global: mixp_*; local: *; };' >$(SHARED)/exports
	$(Q)$(CC) $(EXPORTS) $(OPENMP) $^ $(LDFLAGS) $(LDLIBS) -lm -o $@
	$(Q)ln -sf $(SONAME) $(SHARED)/libmixprec$(if $(filter %.dylib,$@),.dylib,.so)
$(SHARED)/libmixprec.cdef: mixprec.h src/declarations.awk
	$(Q)mkdir -p $(@D) && echo '#include "mixprec.h"' >$(SHARED)/public.c && $(CC) -std=$(STD) -E -dD -DMIXPREC_API= \
	    -DMIXPREC_HD=MIXPREC_INLINE '-D__attribute__(x)=' -I. $(SHARED)/public.c | awk -f src/declarations.awk >$@

reference:   ## the API reference, one page: BUILD/reference.html (needs Python)
	$(Q)mkdir -p $(BUILD) && $(PYTHON) src/reference.py >$(BUILD)/reference.html && echo "open $(BUILD)/reference.html"

# A release: the files that users copy, with checksums, and the library of this machine. The same commit gives the same
# bytes of the files; those of the library depend on the compiler.
DIST    = $(BUILD)/dist/mixprec-$(VERSION)
MACHINE = $(shell uname -sm | tr 'A-Z ' 'a-z-')
dist: dist-files $(SHARED)/libmixprec.a   ## a release in BUILD/dist: header, companion, parts, add-ons, checksums, and a static library of this machine
	$(Q)rm -rf $(DIST)-$(MACHINE) && mkdir $(DIST)-$(MACHINE) && cp mixprec.h $(SHARED)/libmixprec.a LICENSE $(DIST)-$(MACHINE)/
	$(call pack_release,$(DIST)-$(MACHINE))
dist-files: mixprec.h mixprec_cuda.cu
	$(Q)rm -rf $(BUILD)/dist && mkdir -p $(DIST) && cp mixprec.h $(SOURCED) $(ADDONS:%=examples/%.h) $(DIST)/
	$(call pack_release,$(DIST))
define pack_release
$(Q)cd $1 && sha256sum * >SHA256SUMS
$(Q)cd $(BUILD)/dist && tar --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime=@0 -cf - \
    $(notdir $1) | gzip -n >$(notdir $1).tar.gz && sha256sum $(notdir $1).tar.gz
endef
$(SHARED)/libmixprec.a: $(RELEASE_OBJECTS)
	$(Q)rm -f $@ && $(AR) rcs $@ $^
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
	        for (i = 1; i <= count; i++) if (!(order[i] in shown)) show(order[i], text[order[i]]) }' Makefile
	@echo
	@echo 'BUILD is the folder of what make builds: $(BUILD), or another with BUILD=dir'
