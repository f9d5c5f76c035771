# fuzz.mk - fuzz programs: replayed by the tests, explored by make fuzz. tests/tests.mk includes it.
# SPDX-License-Identifier: MIT OR Unlicense

FUZZ := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
FUZZ_SECONDS ?= 600
TESTS += $(FUZZ:%=$(BUILD)/%)

# traps.h needs feenableexcept.
$(FUZZ:%=$(BUILD)/%) $(FUZZ:%=$(BUILD)/%-explore): private CPPFLAGS += -D_GNU_SOURCE

# Some compile functions of the implementation again, unoptimised because that is fast.
$(FUZZ:%=$(BUILD)/%): private light = -O0
$(FUZZ:%=$(BUILD)/%): $(BUILD)/%: tests/fuzz/%.c $(BUILT) ; $(link)
$(BUILD)/fuzz_resume: private done = $(AS_HOST)

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
	$(Q)mkdir -p $(@D) && clang -std=c99 -g -O1 $(CPPFLAGS) -DFUZZ_EXPLORE -DMIXPREC_IMPLEMENTATION= -fsanitize=fuzzer,address,undefined \
	    -fno-sanitize-recover=all -I. -Itests -Itests/support $< -lm -o $@

# One after the other. Findings stay in BUILD/fuzz as crash-NAME...; pass such a file to BUILD/NAME.
.PHONY: fuzz
fuzz: $(FUZZ:%=$(BUILD)/%) $(FUZZ:%=$(BUILD)/%-explore)   ## look for inputs that break a promise (clang; FUZZ_SECONDS=600 for each)
	$(Q)for f in $(FUZZ); do mkdir -p $(BUILD)/fuzz/$$f && $(BUILD)/$$f --seeds $(BUILD)/fuzz/$$f && \
	    $(BUILD)/$$f-explore -max_total_time=$(FUZZ_SECONDS) -max_len=8192 -rss_limit_mb=4096 \
	        $$([ $$f = fuzz_options ] && echo -detect_leaks=0 -close_fd_mask=2) -print_final_stats=1 \
	        -artifact_prefix=$(BUILD)/fuzz/crash-$$f- $(BUILD)/fuzz/$$f || exit 1; done
