# tests.mk - how the tests are found, built and run; the Makefile includes it.
# SPDX-License-Identifier: MIT OR Unlicense

# A test is found in every folder of tests/ and in tests/ itself; build/test_x is built from the test_x.c of
# any folder, so two folders cannot have a test of the same name.
tests_like = $(wildcard tests/$1 tests/*/$1 tests/*/*/$1)
SOURCES  := $(call tests_like,test_*.c) $(call tests_like,long_*.c) $(call tests_like,test_*.cpp)
TWICE    := $(strip $(foreach n,$(sort $(basename $(notdir $(SOURCES)))),$(word 2,$(filter %/$n.c %/$n.cpp,$(SOURCES)))))
$(if $(TWICE),$(error two tests have one name: $(TWICE)))
program    = $(addprefix $(BUILD)/,$(basename $(notdir $(call tests_like,$1))))
TEST_DIRS := $(sort $(dir $(SOURCES)))
vpath test_%.c $(TEST_DIRS)
vpath long_%.c $(TEST_DIRS)
vpath test_%.cpp $(TEST_DIRS)
TESTS    := $(call program,test_*.c)
# Six and ten minutes: test-variants has them.
LONGEST  := $(BUILD)/long_formats $(BUILD)/long_everyday
LONG     := $(filter-out $(LONGEST),$(call program,long_*.c))

# OWN names the programs that compile their own implementation; HOST those of them that compile only the
# host's part, and take the kernels from the library.
OWN    = test_checkpoint test_checkpoint_stdio test_threads test_amx test_cpuid test_block bench_optimizer tiles_rest
HOST   = test_checkpoint test_checkpoint_stdio test_threads test_block
AS_HOST = $(if $(PARTS),-DMIXPREC_PART=MIXPREC_HOST)

# Programs with long loops of their own. A LIGHT that is given holds for them, too.
BUSY = test_any_batch test_attention test_attention_apart test_borders test_codes test_everyday test_everyday_recipes test_fallback \
       test_float_mode test_gemm test_guard test_kernels test_ranks test_ranks_buffers test_ranks_refused test_ranks_tcp \
       test_ranks_threads test_recipe_inf test_recipes test_recompute test_reference test_refused test_refused_step test_report \
       test_state_bytes test_states test_watch_scale
$(BUSY:%=$(BUILD)/%): private LIGHT = $(if $(filter file,$(origin CFLAGS)),-O1)

# The programs that compile their own implementation need no speed.
$(OWN:%=$(BUILD)/%): private light = -O0

# Tests and scripts that only make test-long runs; CUDA_LATER (tests/cuda/cuda.mk) names CUDA's. Each option, room or
# tool that they test has other tests in make test.
LATER = $(addprefix $(BUILD)/,test_amx test_block test_checkpoint_stdio test_everyday_recipes fuzz_graph fuzz_orders fuzz_resume)
LATER_SCRIPTS = tests/cuda/test_gpu.sh tests/tools/test_cmake.sh tests/cpu/test_tile.sh tests/files/test_names.sh \
                tests/tools/test_only_formats.sh tests/tools/test_slow_build.sh
$(BUILD)/test_threads $(BUILD)/test_ranks_refused $(BUILD)/test_ranks_threads $(BUILD)/test_ranks_buffers $(BUILD)/test_ranks_state: private LDLIBS += -pthread

# Tests that look inside the library compile only the functions that they call (tests/support/internals.h). Two call
# functions of the host's part alone.
$(BUILD)/test_optimizers $(BUILD)/test_optim_db $(BUILD)/test_pairs $(BUILD)/test_guard_traits: private light = -O1 -fno-inline
$(BUILD)/test_optim_db $(BUILD)/test_guard_traits: private done = $(AS_HOST)

$(BUILD)/%: %.c $(BUILT)          ; $(link)

# Tests that compile all of mixprec.h need not wait for the library.
OWN_TESTS := $(patsubst %,$(BUILD)/%,$(filter test_%,$(filter-out $(HOST),$(OWN))))
$(OWN_TESTS): private LIB =
$(OWN_TESTS): $(BUILD)/%: %.c $(HEADER) $(BUILD)/flags ; $(link)

# A call of each public function, made from the declarations.
EVERY = -DMIXPREC_API=EVERY -DMIXPREC_HD=EVERY '-D__attribute__(x)=EVERY_UNUSED' $(patsubst %,-D%_API=EVERY,CONV RECURRENT QK_CLIP)
$(BUILD)/include/every_call.h: tests/core/tape/test_every_call.c tests/support/every_call.awk tests/support/every_call.txt $(HEADER) $(wildcard examples/*.h)
	$(call say,make $@)
	$(Q)grep -E '^#include "(mixprec.h|examples/)' $< >$(BUILD)/every_call.c
	$(Q)$(CC) -E -std=$(STD) $(INCLUDES) $(EVERY) $(BUILD)/every_call.c >$(BUILD)/every_call.i
	$(Q)awk -f tests/support/every_call.awk tests/support/every_call.txt $(BUILD)/every_call.i >$@
$(BUILD)/test_every_call: $(BUILD)/include/every_call.h

# Models with a planted overflow and with lost gradients, which tests/programs/test_overflow.sh runs.
PLANTED  := $(BUILD)/overflow $(BUILD)/underflow
$(PLANTED): $(BUILD)/%: tests/programs/%.c $(BUILT) ; $(link)

# The header's features for C++ only.
CPP_TESTS := $(if $(shell command -v $(CXX)),$(BUILD)/test_scopes)
$(BUILD)/test_scopes: tests/core/autocast/test_scopes.cpp $(BUILT) tests/support/test.h
	$(call say,c++ $@)
	$(Q)$(CXX) -std=c++11 $(filter-out -Wstrict-prototypes,$(WARN)) $(if $(WERROR),-Werror) -O1 $(INCLUDES) \
	    $< $(LIB) $(OMP_LINK) -lm -o $@

include tests/cuda/cuda.mk tests/bench/bench.mk tests/fuzz/fuzz.mk

# Every test command ends with the line `N passed, N failed, N skipped`; tests/tools/run.sh sums.
SCRIPTS = $(call tests_like,test_*.sh) tests/tools/symbols.sh tests/tools/rooms.sh tests/tools/metrics.sh tests/tools/install.sh

# The longest tests come first, so that parallel tests end at about the same time.
LONG_SCRIPTS = tests/trainer/test_trainer.sh tests/programs/test_docs.sh tests/tools/symbols.sh tests/programs/test_tiny_gpt.sh \
               tests/programs/test_overflow.sh tests/tools/test_left_out.sh

# A test that mostly waits for dead ranks: it starts first, so that other tests compute meanwhile.
SLEEPER = $(BUILD)/test_ranks_apart

# What the scripts know of the build.
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

.PHONY: test test-long test-variants test-all test-programs coverage

# The two longest compilations come first, so that no core waits for them.
QUICK_TESTS = $(filter-out $(LATER),$(TESTS))
test: $(LIB) $(if $(CUDA_TESTS),$(BUILD)/cudasim_plain.o) $(QUICK_TESTS) $(CPP_TESTS) $(CUDA_TESTS) $(if $(GPU),$(GPU_TESTS)) $(PLANTED) $(EXAMPLES)   ## the tests: three minutes on 2 cores, four with CUDA's headers; needs only cc and make
	$(Q)$(EXPORT) MIXPREC_TEST_QUICK=2 tests/tools/run.sh -j $(RUN_JOBS) $(SLEEPER) $(LONG_SCRIPTS) \
	    $(call CUDA_RUN,$(CUDA_TESTS)) $(filter-out $(SLEEPER),$(QUICK_TESTS)) $(CPP_RUN) $(if $(GPU),$(GPU_RUN)) \
	    'tests/tools/compile_matrix.sh short' $(filter-out $(LONG_SCRIPTS) $(LATER_SCRIPTS),$(SCRIPTS))

# Lines and branches of mixprec.h that the C tests reach, in a build of its own.
coverage:   ## which lines of mixprec.h the C tests reach (needs gcov; takes minutes)
	$(Q)$(EXPORT) tests/tools/coverage.sh $(notdir $(TESTS))

# The order lets parallel tests end at about the same time.
# With the sanitizers, recipes in every program take six minutes: test-variants has them.
SANE_RECIPES  = $(filter %_recipes,$(CUDA_SANE))
LONGEST_FIRST = $(filter %_training,$(CUDA_SANE)) $(filter-out %_training $(SANE_RECIPES),$(CUDA_SANE))
# Three of them take four minutes each: test-variants has them whole.
SANE_LONG = $(filter %_attention %_everyday %_layouts,$(LONGEST_FIRST))
SANE_RUN  = $(SANE_LONG:%='MIXPREC_TEST_QUICK=1 %') $(filter-out $(SANE_LONG),$(LONGEST_FIRST))

# Cases that make test leaves out or cuts short. CUDA's other tests run as a whole, with the sanitizers.
CASES = codes=every_way kernels=test_binary recipes=instruction_sets attention=longer ranks=long_sums ranks_tcp=dtypes ranks_buffers=programs \
        report=test_decimal_comma $(foreach c,narrow_products with_codes near_the_cpu replays,$(if $(CUDA_TESTS),cuda_recipes=$c))
SHORTER = $(BUILD)/test_everyday_recipes $(if $(CUDA_TESTS),$(BUILD)/test_cuda_everyday_recipes)
# (variant.sh amx runs test_amx)
WHOLE = $(BUILD)/test_gemm $(BUILD)/test_refused $(BUILD)/test_ranks_refused $(filter-out %/test_amx $(SHORTER),$(LATER))
WHOLE_CASES = $(foreach c,$(CASES),'MIXPREC_TEST_ONLY=$(word 2,$(subst =, ,$c)) $(BUILD)/test_$(word 1,$(subst =, ,$c))') \
              $(WHOLE) $(SHORTER:%='MIXPREC_TEST_QUICK=1 %')
WHOLE_SCRIPTS = $(LATER_SCRIPTS) tests/tools/symbols.sh tests/tools/test_cases.sh \
                tests/programs/test_tiny_gpt.sh tests/programs/test_show.sh tests/programs/test_bert.sh tests/programs/test_trail.sh

test-long: $(WHOLE) $(SHORTER) $(foreach c,$(CASES),$(BUILD)/test_$(firstword $(subst =, ,$c))) $(BUILD)/test_gpt2 $(BUILD)/test_llama $(LONGEST_FIRST) $(PTX_TESTS) $(PTX_FAULTS) $(if $(NVCC),rehearsal-programs) $(SIM_PROGRAMS) $(BENCH_BUILDS) $(LONG) $(PLANTED) $(EXAMPLES)   ## what takes longer: sanitizers, simulated CUDA, nvcc's PTX
	$(Q)$(EXPORT) tests/tools/run.sh -t 1500 -j $(JOBS) 'PTX_ARCHS="$(PTX_ARCHS)" tests/cuda/ptx.sh' tests/cuda/rehearsal.sh tests/cuda/cuda_programs.sh 'ARCHS=90 tests/cuda/cuda_static.sh' \
	    $(LONG) $(call CUDA_RUN,$(SANE_RUN)) 'tests/tools/variant.sh arm' 'tests/tools/variant.sh amx' 'tests/tools/variant.sh tiles' tests/ranks/ranks_mpi.sh tests/ranks/ranks_nccl.sh \
	    'RANKS_KILLS=50 MIXPREC_TEST_ONLY=killed_rank $(BUILD)/test_ranks' $(WHOLE_CASES) $(WHOLE_SCRIPTS) \
	    tests/tools/rooms.sh tests/tools/format.sh tests/tools/test_left_out.sh tests/programs/test_overflow.sh tests/programs/test_real_data.sh 'tests/tools/compile_matrix.sh languages' 'tests/tools/mutation.sh -n' 'tests/tools/mutation_c.sh -n' \
	    tests/tools/test_packages.sh tests/tools/test_parts.sh tests/tools/test_shared.sh tests/tools/test_workflows.sh tests/tools/install.sh tests/tools/test_reference_page.sh tests/programs/test_web.sh tests/programs/test_docs.sh \
	    $(patsubst %,'$(PYTHON) %',$(call tests_like,interop*.py)) \
	    $(BARE:%='CXX=absent PYTHON=absent CUDA= NVCC= MIXPREC_TEST_QUICK=2 %')

# What make test does where only cc and make are: the scripts that ask for more than a C compiler.
BARE = $(shell grep -lE 'CXX|PYTHON|cmake' $(filter-out $(LATER_SCRIPTS) tests/trainer/test_trainer.sh,$(SCRIPTS)))

# Too long for CI on two cores. tests/tools/variant.sh lists them.
VARIANTS ?= no_ranks no_watch no_checkpoint no_recipes ofast gnu finite sanitizers threads clang O0 O3 lto trapv char tiles_all m32 gcc-11 clang-13 clang-16 musl tcc mingw clang_cl \
            aarch64 armhf riscv64 ppc64le s390x
test-variants: $(LONGEST) $(GPU_TESTS) $(SANE_RECIPES) $(SANE_LONG) $(CUDA_FMA) $(PTX_TESTS) $(EXAMPLES)   ## every compiler and flag, all 2^32 floats, all planted faults, nvcc's link of the GPU tests
	$(Q)$(EXPORT) tests/tools/run.sh -t 3000 'tests/tools/compile_matrix.sh full' $(LONGEST) $(GPU_RUN) $(SANE_RECIPES) $(SANE_LONG) $(CUDA_FMA) \
	    tests/cuda/cuda_static.sh tests/tools/mutation.sh tests/tools/mutation_c.sh tests/cuda/ptx_plants.sh tests/tools/cortex_m.sh \
	    $(patsubst %,'tests/tools/variant.sh %',$(VARIANTS))

test-all: test test-long test-variants   ## test, test-long and test-variants; an hour and more

# Only the C tests, for another compiler or other flags (tests/tools/variant.sh).
# LEFT: names of tests that a variant cannot build; each is one skip. EXE: the suffix of programs.
test-programs: $(TESTS)
	$(Q)tests/tools/run.sh -t 900 -j $(JOBS) $(TESTS:%='$(RUNNER) %$(EXE)') \
	    $(LEFT:%=': % is left out; echo 0 passed, 0 failed, 1 skipped')
