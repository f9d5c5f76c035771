# kit.mk - programs for the GPU of another machine, which start there without a build: one shared library with
# mixprec and the companion, the CUDA tests, the bench, the trainer, the probe. The Makefile includes it;
# tests/cuda/gpu.sh explains how the programs are used.
#
#   KIT_ARCH=sm_90a  the GPU of that machine

KIT      ?= $(BUILD)/kit
KIT_ARCH ?= sm_90a
KIT_NVCC  = $(NVCC) -std=c++17 -arch=$(KIT_ARCH) $(SPLIT) -x cu $(INCLUDES)
KIT_TESTS = $(notdir $(GPU_TESTS))
KIT_OTHERS = probe bench_cuda trainer_cuda bench_gemm bench_threads

# The objects of one GPU lie in a folder of their own: those of another cannot be mistaken for them.
KIT_OBJECTS = $(BUILD)/kit_objects/$(KIT_ARCH)

$(KIT_OBJECTS)/inside.o: tests/cuda/inside.cu tests/cuda/inside.h $(COMPANION) $(HEADER)
	$(call say,nvcc $@: two to three minutes of a core)
	$(Q)mkdir -p $(@D) && $(KIT_NVCC) -O3 -Xcompiler -fPIC -c $< -o $@
$(KIT_TESTS:%=$(KIT_OBJECTS)/%.o): $(KIT_OBJECTS)/%.o: %.cpp tests/cuda/inside.h $(HEADER) \
        $(filter-out tests/support/cudasim%,$(wildcard tests/support/*.h))
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(KIT_NVCC) -O1 -DCOMPANION_LINKED -c $< -o $@
$(KIT_OBJECTS)/probe.o: tests/cuda/probe.cu
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(KIT_NVCC) -O2 -c $< -o $@

# Programs without device code serve every GPU: the bench, and BUILD/trainer_cuda.o.
$(BUILD)/kit_objects/bench_cuda.o: tests/bench/bench_cuda.cpp tests/support/ledger.h $(HEADER)
	$(call say,c++ $@)
	$(Q)mkdir -p $(@D) && $(CXX) -std=c++17 -O2 -isystem $(CUDA)/include $(INCLUDES) -c $< -o $@

$(BUILD)/kit_objects/bench_%.o: tests/bench/bench_%.c tests/bench/gpt.h examples/profile.h $(HEADER)
	$(call say,cc $@)
	$(Q)mkdir -p $(@D) && $(CC) -O2 -DMIXPREC_IMPLEMENTATION_DONE $(INCLUDES) -c $< -o $@

# $(call kit,FOLDER,OBJECTS,LIBRARY,CUDA,MORE): the programs of a kit in FOLDER. OBJECTS has the objects of tests and
# probe, LIBRARY lists those of the shared library, CUDA are the options that link CUDA's libraries, MORE is what each
# program has in itself. Programs find the library beside their own folder.
define kit
$1/lib/libmixprec_gpu.so: $3
	$$(call say,c++ $$@)
	$$(Q)mkdir -p $$(@D) && $(CXX) -shared -s -Wl,-soname,$$(@F) -Wl,-rpath,'$$$$ORIGIN' -o $$@ $$^ $4 \
	    $$(OMP_LINK) -ldl -lm
$(KIT_TESTS:%=$1/bin/%): $1/bin/%: $2/%.o $1/lib/libmixprec_gpu.so $5 ; $$(kit_link)
$1/bin/probe: $2/probe.o ; $$(kit_link)
$1/bin/bench_cuda: $(BUILD)/kit_objects/bench_cuda.o $1/lib/libmixprec_gpu.so $5 ; $$(kit_link)
$1/bin/trainer_cuda: $(BUILD)/trainer_cuda.o $1/lib/libmixprec_gpu.so $5 ; $$(kit_link)
$1/bin/bench_gemm $1/bin/bench_threads: $1/bin/%: $(BUILD)/kit_objects/%.o $1/lib/libmixprec_gpu.so $5 ; $$(kit_link)
$(KIT_TESTS:%=$1/bin/%) $(KIT_OTHERS:%=$1/bin/%): private KIT_LIBS = $4
endef
define kit_link
$(call say,c++ $@)
$(Q)mkdir -p $(@D) && $(CXX) -s -rdynamic $^ $(KIT_LIBS) -Wl,-rpath,'$$ORIGIN/../lib' $(OMP_LINK) -ldl -lm -o $@
endef

CUDA_FOLDERS = -L$(CUDA)/lib64 -L$(CUDA)/lib -L$(CUDA)/targets/x86_64-linux/lib
$(eval $(call kit,$(KIT),$(KIT_OBJECTS),$(KIT_OBJECTS)/inside.o $(RELEASE_OBJECTS),$(CUDA_FOLDERS) -lcublasLt -lcudart))

KIT_PROGRAMS = $(KIT_TESTS:%=$(KIT)/bin/%) $(KIT_OTHERS:%=$(KIT)/bin/%)
kit-programs: $(KIT_PROGRAMS)

# The same kit as PTX, on the interpreter: tests/cuda/runtime.cpp as a shared library stands for CUDA's two. mixprec
# itself is the library of the other tests, in each program.
CUDA_MAJOR = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\).*/\1/p')
REHEARSAL = $(BUILD)/rehearsal
REHEARSED ?= test_cuda_by_hand test_cuda_optimizers test_cuda_training
$(REHEARSAL)/lib/libcudart.so: $(BUILD)/ptx/runtime.o
	$(Q)mkdir -p $(@D) && $(CXX) -shared -Wl,-soname,$(@F).$(CUDA_MAJOR) -o $@.$(CUDA_MAJOR) $^ -lm && \
	    ln -sf $(@F).$(CUDA_MAJOR) $@
$(REHEARSAL)/lib/libcublasLt.so:
	$(Q)mkdir -p $(@D) && echo 'typedef int nothing;' >$(@D)/empty.c && \
	    $(CC) -shared -Wl,-soname,$(@F).$(CUDA_MAJOR) -o $@.$(CUDA_MAJOR) $(@D)/empty.c && \
	    ln -sf $(@F).$(CUDA_MAJOR) $@
$(BUILD)/ptx/probe.o: tests/cuda/probe.cu
	$(call say,nvcc $@)
	$(Q)mkdir -p $(@D) && $(NVCC) $(PTX_FLAGS) -O1 $(call ptx_for,90a) -c $< -o $@
$(REHEARSAL)/lib/libmixprec_gpu.so $(REHEARSAL)/bin/probe: | $(addprefix $(REHEARSAL)/lib/,libcudart.so libcublasLt.so)
$(eval $(call kit,$(REHEARSAL),$(BUILD)/ptx,$(BUILD)/ptx/inside_90a.o,-L$(REHEARSAL)/lib -lcublasLt -lcudart,$(LIB)))
rehearsal-programs: $(REHEARSED:%=$(REHEARSAL)/bin/%) $(KIT_OTHERS:%=$(REHEARSAL)/bin/%)

.PHONY: kit-programs rehearsal-programs
