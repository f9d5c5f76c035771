# cuda.mk - the tests of the companion: on a simulated GPU, as nvcc's PTX, on a GPU. tests/tests.mk includes it.
# SPDX-License-Identifier: MIT OR Unlicense

# A C++ compiler compiles the companion for a simulated GPU: plain for the quick tests, and for the
# long tests with the sanitizers, which take three times as long. The simulation's own tests check
# the sanitizers' messages, so they always use the sanitizers. CUDA_LATER names the tests that only
# make test-long runs.
CUDA_LATER  = attention_apart by_hand ema everyday_recipes face guard jvp layouts lt_narrow muon narrow products recompute replays training
CUDA_SANE  := $(if $(CUDA),$(patsubst $(BUILD)/%,$(BUILD)/sane/%,$(call program,test_cuda*.cpp)))
CUDA_PLAIN := $(patsubst $(BUILD)/sane/%,$(BUILD)/%,$(filter-out %/test_cudasim,$(CUDA_SANE)))
CUDA_TESTS := $(filter-out $(CUDA_LATER:%=$(BUILD)/test_cuda_%),$(CUDA_PLAIN))
SANE        = -g1 -fsanitize=address,undefined -fno-sanitize-recover=all
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
# A test calls compiled kernels; with the sanitizers -O1 would compile each three times as long.
$(CUDA_PLAIN) $(CUDA_SANE) $(BUILD)/simulated.h.gch $(BUILD)/sane/simulated.h.gch: private SIM_FLAGS += -O0
$(filter-out %/test_cudasim,$(CUDA_SANE)): $(BUILD)/cudasim.o $(LIB)

# Most of a CUDA test is headers: they are compiled once. test_cuda_by_hand defines macros before its headers.
# gcc warns of unused functions of a header only if the header is precompiled.
WITH_HEADERS := $(filter-out %/test_cuda_by_hand %/test_cudasim,$(CUDA_PLAIN) $(CUDA_SANE))
$(filter-out $(BUILD)/sane/%,$(WITH_HEADERS)): $(BUILD)/simulated.h.gch
$(filter $(BUILD)/sane/%,$(WITH_HEADERS)): $(BUILD)/sane/simulated.h.gch
$(WITH_HEADERS): private HEADERS = -include $(@D)/simulated.h
$(WITH_HEADERS): private SIM_FLAGS += -Wno-unused-function

$(BUILD)/sane/simulated.h.gch: private SIM_FLAGS += $(SANE)
$(BUILD)/simulated.h.gch $(BUILD)/sane/simulated.h.gch: $(wildcard tests/support/*.h) tests/cuda/inside.h $(HEADER) $(BUILD)/flags
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && printf '#include "support/checked.h"\n#include "companion.h"\n' >$(@:.gch=)
	$(Q)$(CXX) $(SIM_FLAGS) $(filter -f%,$(OMP_LINK)) -DCOMPANION_LINKED -x c++-header $(@:.gch=) -o $@

$(CUDA_PLAIN): $(BUILD)/%: %.cpp $(LIB) $(COMPANION) $(wildcard tests/support/*.h)
	$(call say,c++ $@)
	$(Q)$(CXX) $(HEADERS) $(SIM_FLAGS) $< $(filter %.o,$^) $(LIB) $(OMP_LINK) -lm -o $@

$(CUDA_SANE): $(BUILD)/sane/%: %.cpp $(HEADER) $(COMPANION) $(wildcard tests/support/*.h)
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(HEADERS) $(SIM_FLAGS) $(SANE) $< $(filter %.o,$^) $(filter %.a,$^) $(OMP_LINK) -lm -o $@

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
GPU_FLAGS  = -std=c++17 $(if $(GPU),$(CUDA_HERE) $(SPLIT),-arch=compute_80 -Xcicc -O1) -O1 -x cu $(INCLUDES)

$(BUILD)/gpu/inside.o: tests/cuda/inside.cu tests/cuda/inside.h $(COMPANION) $(HEADER)
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(NVCC) $(GPU_FLAGS) -c $< -o $@

$(GPU_TESTS): $(BUILD)/gpu/%: %.cpp $(BUILD)/gpu/inside.o $(LIB) $(wildcard tests/support/*.h)
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(NVCC) $(GPU_FLAGS) -DCOMPANION_LINKED -c $< -o $@.o
	$(Q)$(CXX) $@.o $(filter %.o,$^) $(LIB) $(OMP_LINK) $(CUDA_LIBS) -lm -o $@

# The same programs without a GPU: tests/cuda/runtime.cpp replaces libcudart and interprets the PTX
# that nvcc generated. The few kernels of a test itself are compiled once, for 7.5: newer GPUs run
# them. 90a is 9.0 with wgmma.
PTX_ARCHS ?= 75 80 90a
PTX_NAMES := $(if $(NVCC),$(notdir $(CUDA_PLAIN)))
# Only GPUs of 10.0 and newer run all kernels of narrow products.
PTX_NEWEST := $(if $(NVCC),$(shell $(NVCC) --list-gpu-code 2>/dev/null | sed -n 's/^sm_100$$/100/p'))
PTX_TESTS := $(foreach a,$(PTX_ARCHS),$(PTX_NAMES:%=$(BUILD)/ptx/sm_$a/%)) \
             $(PTX_NEWEST:%=$(BUILD)/ptx/sm_%/test_cuda_narrow)
PTX_FLAGS  = -std=c++17 --no-compress -x cu -Xcompiler -fPIC $(INCLUDES)
ptx_for    = -gencode arch=compute_$1,code=compute_$1
# nvcc 13 has no 7.0: the paths of 7.0, compiled for 7.5, stand in for it (PTX_GPU in runtime.cpp).
PTX_VOLTA := $(if $(NVCC),$(if $(filter compute_70,$(shell $(NVCC) --list-gpu-arch 2>/dev/null)),70,75))
PTX_OLDEST := $(if $(NVCC),$(foreach t,cuda cuda_attention cuda_rows,$(BUILD)/ptx/sm_70/test_$t))

$(BUILD)/ptx/runtime.o: tests/cuda/runtime.cpp $(wildcard tests/cuda/*.h) $(wildcard tests/support/cudasim*.h)
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) -std=c++17 -Wall -Wextra $(if $(WERROR),-Werror) -O2 -fwrapv -frounding-math \
	    -ffp-contract=off -fno-strict-aliasing -fPIC -isystem $(CUDA)/include -Itests -Itests/support -c $< -o $@

$(BUILD)/ptx/inside_70.o: private PTX_FLAGS += -DMIXPI_CUDA_ARCH=700
$(BUILD)/ptx/inside_70.o: private ptx_for = -gencode arch=compute_$(PTX_VOLTA),code=compute_$(PTX_VOLTA)
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
$(foreach a,$(sort 70 $(PTX_ARCHS) $(PTX_NEWEST)),$(eval $(call ptx_link,$a)))

# Kernels with one fault each: does the interpreter report it?
PTX_FAULTS := $(if $(NVCC),$(BUILD)/ptx/ptx_faults $(BUILD)/ptx/ptx_wgmma)
$(BUILD)/ptx/ptx_faults: private faults_for = 80
$(BUILD)/ptx/ptx_wgmma: private faults_for = 90a
$(PTX_FAULTS): $(BUILD)/ptx/%: tests/cuda/%.cu $(BUILD)/ptx/runtime.o
	$(call say,nvcc $@)
	$(Q)$(NVCC) $(PTX_FLAGS) -O1 $(call ptx_for,$(faults_for)) -c $< -o $@.o
	$(Q)$(CXX) $@.o $(BUILD)/ptx/runtime.o -lm -o $@

# Programs for a GPU on the simulated one: the trainer and the bench.
$(BUILD)/cudasim.o: private SIM_MORE = $(SANE)
# -O2 would compile for ten seconds more, and save a tenth of the quick tests.
$(BUILD)/cudasim.o $(BUILD)/cudasim_plain.o: tests/cuda/inside.cu tests/cuda/inside.h $(COMPANION) $(HEADER) \
        $(wildcard tests/support/cudasim*.h) tests/support/checked.h
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(SIM_FLAGS) $(SIM_MORE) -x c++ -c $< -o $@

SIM_LINK = $(CXX) -fsanitize=address,undefined $(filter %.o %.a,$^) $(OMP_LINK) -lm -o $@

$(BUILD)/trainer_cuda.o: examples/trainer/trainer.c
$(BUILD)/llama_cuda.o: examples/llama.c
$(BUILD)/trainer_cuda.o $(BUILD)/llama_cuda.o: $(wildcard examples/*.h examples/trainer/*.h) $(BUILT)
	$(call say,cc $@)
	$(Q)$(CC) $(FLAGS) -DMIXPREC_IMPLEMENTATION_DONE -DTRAINER_CUDA -c $(filter examples/%.c,$^) -o $@

$(BUILD)/trainer_sim $(BUILD)/llama_sim: $(BUILD)/%_sim: $(BUILD)/%_cuda.o $(BUILD)/cudasim.o $(LIB)
	$(call say,c++ $@)
	$(Q)$(SIM_LINK)

$(BUILD)/bench_cuda_sim.o: tests/bench/bench_cuda.cpp tests/support/ledger.h $(HEADER) $(wildcard tests/support/cudasim*.h)
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) $(SIM_FLAGS) $(SANE) -c $< -o $@

$(BUILD)/bench_cuda_sim: $(BUILD)/bench_cuda_sim.o $(BUILD)/cudasim.o $(LIB)
	$(call say,c++ $@)
	$(Q)$(SIM_LINK)

SIM_PROGRAMS = $(if $(CUDA),$(BUILD)/trainer_sim $(BUILD)/llama_sim $(BUILD)/bench_cuda_sim)
.PHONY: test-ptx test-gpu

test-ptx: $(PTX_TESTS) $(PTX_OLDEST) $(PTX_FAULTS)   ## nvcc's own code, interpreted: the GPU tests without a GPU (needs nvcc)
	$(Q)$(EXPORT) tests/tools/run.sh -t 1500 'PTX_ARCHS="$(PTX_ARCHS)" tests/cuda/ptx.sh'

test-gpu: $(GPU_TESTS)   ## the CUDA tests on the GPU that is there, then under compute-sanitizer (needs nvcc)
	$(Q)if [ -z '$(NVCC)' ]; then echo 'test-gpu: nvcc was not found; set CUDA=dir' >&2; exit 1; fi
	$(Q)$(EXPORT) tests/tools/run.sh -n $(GPU_RUN)
	$(Q)$(EXPORT) tests/cuda/gpu_sanitizer.sh $(GPU_TESTS)
