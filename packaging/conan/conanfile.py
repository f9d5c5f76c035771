"""mixprec as a Conan 2 package. From a checkout: conan create packaging/conan --build=missing"""
import os
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load


class Mixprec(ConanFile):
    name = "mixprec"
    description = "Automatic mixed-precision training for C, C++ and CUDA C"
    license = ("MIT", "Unlicense")
    package_type = "static-library"
    settings = "os", "compiler", "build_type", "arch"
    options = {"openmp": [True, False]}
    default_options = {"openmp": True}
    languages = "C"

    def _checkout(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        header = load(self, os.path.join(self._checkout(), "mixprec.h"))
        self.version = re.search(r'define MIXPREC_VERSION "(.*)"', header).group(1)

    def export_sources(self):
        for name in ("CMakeLists.txt", "mixprec.h", "mixprec_cuda.cu", "src/parts/*.c", "examples/*.h", "LICENSE"):
            copy(self, name, self._checkout(), self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["MIXPREC_OPENMP"] = bool(self.options.openmp)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install()

    def package_info(self):
        self.cpp_info.libs = ["mixprec"]
        self.cpp_info.set_property("cmake_target_name", "mixprec::mixprec")
        if self.settings.os != "Windows":
            self.cpp_info.system_libs = ["m"]
        if self.options.openmp and self.settings.os == "Linux":
            runtime = "gomp" if self.settings.compiler == "gcc" else "omp"
            self.cpp_info.system_libs.append(runtime)
