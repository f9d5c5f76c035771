# packaging.mk - what others take: installation, shared library, release. The Makefile includes it.
# SPDX-License-Identifier: MIT OR Unlicense

.PHONY: install uninstall shared dist dist-files

# What users include, and what they compile: see docs/embedding.md.
ADDONS  = compare conv ops plain_file recurrent report trail
RELEASE_ADDONS = $(ADDONS) gguf profile
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
# of their own; and what the block macros, such as MIXP_NO_GRAD, call. libmixprec.cdef has the declarations that Python's cffi reads. Before 1.0 each minor version has a
# SONAME of its own.
SHARED   = $(BUILD)/shared
SONAME   = libmixprec.so.$(basename $(VERSION))
RELEASED = $(CC) -std=$(STD) $(WARN) $(CPPFLAGS) $(CFLAGS) $(OPENMP) -fPIC -I.
ifeq ($(shell uname -s),Darwin)
  SONAME  = libmixprec.$(basename $(VERSION)).dylib
  EXPORTS = -dynamiclib -Wl,-install_name,@rpath/$(SONAME) -Wl,-exported_symbol,'_mixp_*' \
            -Wl,-exported_symbol,'_mixpi_*_enter' -Wl,-exported_symbol,'_mixpi_*_leave'
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
	$(Q)echo '{ global: mixp_*; mixpi_*_enter; mixpi_*_leave; local: *; };' >$(SHARED)/exports
	$(Q)$(CC) $(EXPORTS) $(OPENMP) $^ $(LDFLAGS) $(LDLIBS) -lm -o $@
	$(Q)ln -sf $(SONAME) $(SHARED)/libmixprec$(if $(filter %.dylib,$@),.dylib,.so)
$(SHARED)/libmixprec.cdef: mixprec.h src/declarations.awk
	$(Q)mkdir -p $(@D) && echo '#include "mixprec.h"' >$(SHARED)/public.c && $(CC) -std=$(STD) -E -dD -DMIXPREC_API= \
	    -DMIXPREC_HD=MIXPREC_INLINE '-D__attribute__(x)=' -I. $(SHARED)/public.c | awk -f src/declarations.awk >$@

# A release: the files that users copy, with checksums, and the library of this machine. The same commit gives the same
# bytes of the files; those of the library depend on the compiler.
DIST    = $(BUILD)/dist/mixprec-$(VERSION)
MACHINE = $(shell uname -sm | tr 'A-Z ' 'a-z-')
dist: dist-files $(SHARED)/libmixprec.a   ## a release in BUILD/dist: header, its formats alone, companion, parts, add-ons, reference, SBOM, checksums; a static library of this machine
	$(Q)rm -rf $(DIST)-$(MACHINE) && mkdir $(DIST)-$(MACHINE) && cp mixprec.h $(SHARED)/libmixprec.a LICENSE $(DIST)-$(MACHINE)/
	$(call pack_release,$(DIST)-$(MACHINE))
dist-files: mixprec.h mixprec_cuda.cu
	$(Q)rm -rf $(BUILD)/dist && mkdir -p $(DIST)
	$(Q)cp mixprec.h $(SOURCED) $(RELEASE_ADDONS:%=examples/%.h) CHANGELOG.md SECURITY.md $(DIST)/
	$(Q)awk -f packaging/slice.awk mixprec.h >$(DIST)/mixprec_formats.h
	$(Q)if command -v $(PYTHON) >/dev/null; then $(PYTHON) src/reference.py >$(DIST)/reference.html; \
	    else echo 'dist: no $(PYTHON), so the release has no reference.html'; fi
	$(Q)$(sbom) >$(DIST)/mixprec.spdx
	$(call pack_release,$(DIST))
# What the release consists of, in SPDX 2.3: one package without dependencies. Its date is that of the commit.
sbom = printf '%s\n' 'SPDXVersion: SPDX-2.3' 'DataLicense: CC0-1.0' 'SPDXID: SPDXRef-DOCUMENT' 'DocumentName: mixprec-$(VERSION)' \
    'DocumentNamespace: https://spdx.org/spdxdocs/mixprec-$(VERSION)' 'Creator: Organization: the maintainers of mixprec' \
    "Created: $$(TZ=UTC0 git log -1 --date='format-local:%Y-%m-%dT%H:%M:%SZ' --format=%cd 2>/dev/null || echo 1970-01-01T00:00:00Z)" '' \
    'PackageName: mixprec' 'SPDXID: SPDXRef-mixprec' 'PackageVersion: $(VERSION)' 'PackageDownloadLocation: NOASSERTION' \
    'FilesAnalyzed: false' 'PackageLicenseConcluded: MIT OR Unlicense' 'PackageLicenseDeclared: MIT OR Unlicense' \
    'PackageCopyrightText: NOASSERTION' "PackageChecksum: SHA256: $$(sha256sum mixprec.h | cut -d ' ' -f 1)" \
    'PackageComment: the checksum is that of mixprec.h' '' 'Relationship: SPDXRef-DOCUMENT DESCRIBES SPDXRef-mixprec'
define pack_release
$(Q)cd $1 && sha256sum * >SHA256SUMS
$(Q)cd $(BUILD)/dist && tar --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime=@0 -cf - \
    $(notdir $1) | gzip -n >$(notdir $1).tar.gz && sha256sum $(notdir $1).tar.gz
endef
$(SHARED)/libmixprec.a: $(RELEASE_OBJECTS)
	$(Q)rm -f $@ && $(AR) rcs $@ $^
