#!/bin/sh
# test_packages.sh - scratch projects get mixprec in each way that CMakeLists.txt and packaging/
# offer, build a program and run it. Under MIXPREC_TEST_QUICK they are only configured.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

if ! command -v cmake >/dev/null 2>&1; then
    skip 'mixprec in CMake projects (no cmake)'
    report
    exit
fi
unset MAKEFLAGS MAKELEVEL MFLAGS
here=$PWD
version=$(awk -F '"' '/^#define MIXPREC_VERSION "/ { print $2 }' mixprec.h)

cat >"$tmp/main.c" <<'END'
#include <mixprec.h>
#include <mixprec/compare.h>
#include <mixprec/conv.h>
#include <mixprec/ops.h>
#include <mixprec/recurrent.h>
#include <mixprec/report.h>
#include <stdio.h>
int main(void) {
    char message[MIXP_MESSAGE_SIZE];
    float in[3] = { 1.0f, 65504.0f, 1e-8f }, out[3];
    mixp_f16 half[3];
    mixp_convert(half, MIXP_F16, in, MIXP_F32, 3);
    mixp_convert(out, MIXP_F32, half, MIXP_F16, 3);
    printf("%s %g %g %g\n", mixp_version(), (double)out[0], (double)out[1], (double)out[2]);
    return mixp_self_check(message, sizeof message) != MIXP_OK;
}
END

# project NAME LINES [LANGUAGES]: a scratch project of C or of these languages that gets mixprec by these lines. Without
# C its program is C++.
project() {
    mkdir -p "$tmp/$1"
    main=main.c
    case ${3:-C} in C*C*X*) main=main.c ;; CXX) main=main.cpp ;; esac
    cp "$tmp/main.c" "$tmp/$1/$main"
    {
        echo 'cmake_minimum_required(VERSION 3.15)'
        echo "project($1 ${3:-C})"
        echo "$2"
        echo "add_executable(user $main)"
        echo 'target_link_libraries(user PRIVATE mixprec::mixprec)'
    } >"$tmp/$1/CMakeLists.txt"
}
# Without optimisation, which takes a fifth of the time.
builds() {
    name=$1
    shift
    cmake -S "$tmp/$name" -B "$tmp/$name/build" -DMIXPREC_OPTIMIZE=-O0 "$@" &&
        cmake --build "$tmp/$name/build" &&
        [ "$("$tmp/$name/build/user")" = "$version 1 65504 0" ]
}

configures() {
    name=$1
    shift
    cmake -S "$tmp/$name" -B "$tmp/$name/build" "$@"
}
if [ -n "$MIXPREC_TEST_QUICK" ]; then how=configures; else how=builds; fi
project subdirectory "add_subdirectory($here mixprec)"
check 'add_subdirectory'                              $how subdirectory

project fetched 'include(FetchContent)
FetchContent_Declare(mixprec GIT_REPOSITORY https://example.invalid/mixprec.git GIT_TAG v0.1.0)
FetchContent_MakeAvailable(mixprec)'
check 'FetchContent, from a folder'                   $how fetched "-DFETCHCONTENT_SOURCE_DIR_MIXPREC=$here"

port_version() { grep -q "\"version\": \"$version\"" packaging/vcpkg/mixprec/vcpkg.json; }
check 'the port of vcpkg names this version'          port_version
if [ -n "$MIXPREC_TEST_QUICK" ]; then
    skip 'builds, installed packages, pkg-config, vcpkg, Conan, a real CUDA target: in make test-long'
    report
    exit
fi

installed() { cmake --install "$tmp/subdirectory/build" --prefix "$tmp/prefix"; }
project found 'find_package(mixprec 0.1 REQUIRED)'
check 'cmake --install'                               installed
check 'the header that is installed'                  cmp mixprec.h "$tmp/prefix/include/mixprec.h"
check 'find_package'                                  builds found "-DCMAKE_PREFIX_PATH=$tmp/prefix"
project found_cxx 'find_package(mixprec 0.1 REQUIRED)' CXX
project found_both 'find_package(mixprec 0.1 REQUIRED)' 'C CXX'
if command -v "${CXX:-c++}" >/dev/null; then
    check 'find_package in a project of C++ alone'    builds found_cxx "-DCMAKE_PREFIX_PATH=$tmp/prefix"
    check 'find_package in a project of C and C++'    builds found_both "-DCMAKE_PREFIX_PATH=$tmp/prefix"
else skip 'find_package in projects of C++ (no C++ compiler)'
fi
files() { for f in include/mixprec/conv.h share/mixprec/LICENSE share/mixprec/mixprec_host.c; do [ -f "$tmp/prefix/$f" ] || { echo "$f"; return 1; }; done; }
check 'add-ons, licence and parts are installed'      files
# The folder may be moved: the file that pkg-config reads is relative to itself.
by_pkg_config() {
    mv "$tmp/prefix" "$tmp/moved" || return
    PKG_CONFIG_PATH=$(dirname "$(find "$tmp/moved" -name mixprec.pc)") && export PKG_CONFIG_PATH
    pkg-config --modversion mixprec | grep -x "$version" &&
        ${CC:-cc} "$tmp/main.c" $(pkg-config --cflags --libs mixprec) -o "$tmp/by_pkg_config" &&
        [ "$("$tmp/by_pkg_config")" = "$version 1 65504 0" ] && mv "$tmp/moved" "$tmp/prefix"
}
if command -v pkg-config >/dev/null; then check 'pkg-config, in a folder that was moved' by_pkg_config
else skip 'pkg-config (not there)'
fi
other_version() {
    sed 's/mixprec 0.1/mixprec 9.9/' "$tmp/found/CMakeLists.txt" >"$tmp/later.txt"
    mkdir -p "$tmp/later" && cp "$tmp/main.c" "$tmp/later/" && cp "$tmp/later.txt" "$tmp/later/CMakeLists.txt"
    ! cmake -S "$tmp/later" -B "$tmp/later/build" "-DCMAKE_PREFIX_PATH=$tmp/prefix"
}
check 'a version that is not there is refused'        other_version

# The port of vcpkg: its functions are replaced by the CMake calls that they stand for.
cat >"$tmp/vcpkg.cmake" <<END
set(CURRENT_PACKAGES_DIR "$tmp/port")
function(vcpkg_check_features)
    cmake_parse_arguments(PARSE_ARGV 0 a "" "OUT_FEATURE_OPTIONS" "FEATURES")
    set(\${a_OUT_FEATURE_OPTIONS} -DMIXPREC_CUDA=OFF PARENT_SCOPE)
endfunction()
function(vcpkg_cmake_configure)
    cmake_parse_arguments(PARSE_ARGV 0 a "" "SOURCE_PATH" "OPTIONS")
    execute_process(COMMAND \${CMAKE_COMMAND} -S \${a_SOURCE_PATH} -B "$tmp/port-build" -DMIXPREC_OPTIMIZE=-O0
                    -DCMAKE_INSTALL_PREFIX=\${CURRENT_PACKAGES_DIR} \${a_OPTIONS} COMMAND_ERROR_IS_FATAL ANY)
endfunction()
function(vcpkg_cmake_install)
    execute_process(COMMAND \${CMAKE_COMMAND} --build "$tmp/port-build" --target install COMMAND_ERROR_IS_FATAL ANY)
endfunction()
function(vcpkg_cmake_config_fixup)
    cmake_parse_arguments(PARSE_ARGV 0 a "" "PACKAGE_NAME;CONFIG_PATH" "")
    if(NOT EXISTS "\${CURRENT_PACKAGES_DIR}/\${a_CONFIG_PATH}/\${a_PACKAGE_NAME}-config.cmake")
        message(FATAL_ERROR "no \${a_PACKAGE_NAME}-config.cmake in \${a_CONFIG_PATH}")
    endif()
endfunction()
function(vcpkg_fixup_pkgconfig)
    if(NOT EXISTS "\${CURRENT_PACKAGES_DIR}/lib/pkgconfig/mixprec.pc")
        message(FATAL_ERROR "no mixprec.pc in lib/pkgconfig")
    endif()
endfunction()
function(vcpkg_install_copyright)
    cmake_parse_arguments(PARSE_ARGV 0 a "" "" "FILE_LIST")
    file(COPY \${a_FILE_LIST} DESTINATION "\${CURRENT_PACKAGES_DIR}/share/mixprec")
endfunction()
include("$here/packaging/vcpkg/mixprec/portfile.cmake")
END
port() { cmake -P "$tmp/vcpkg.cmake" && [ -f "$tmp/port/include/mixprec.h" ] && [ -f "$tmp/port/share/mixprec/LICENSE" ]; }
check 'the port of vcpkg installs'                port
if command -v conan >/dev/null 2>&1; then
    export CONAN_HOME="$tmp/conan"
    package() ( unset CC CXX; conan profile detect && conan create packaging/conan -s build_type=Debug )
    licence() { [ -n "$(find "$CONAN_HOME/p" -path '*/p/licenses/LICENSE')" ]; }
    check 'Conan builds the package'              package
    check 'with its licence'                      licence
else skip 'the package of Conan (no conan)'
fi
cuda_target() {
    cmake -S . -B "$tmp/cuda" -DMIXPREC_CUDA=ON -DCMAKE_CUDA_COMPILER="$NVCC" -DMIXPREC_OPTIMIZE=-O0
}
if [ -n "$NVCC" ]; then check 'mixprec::cuda is configured' cuda_target
else skip 'mixprec::cuda is configured (no nvcc)'
fi
report
