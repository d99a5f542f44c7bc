# find_package(raglane): the target raglane::raglane is the library of the CPU kernels and raglane.h.
#
# Installed to <prefix>/lib/cmake/raglane; an installed Raglane has its prefix in raglane/native.
get_filename_component(raglane_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
find_library(raglane_library NAMES libraglane_cpu.so raglane_cpu PATHS "${raglane_prefix}/lib" NO_DEFAULT_PATH NO_CACHE)
if(NOT raglane_library OR NOT EXISTS "${raglane_prefix}/include/raglane.h")
  set(raglane_FOUND FALSE)
  set(raglane_NOT_FOUND_MESSAGE "no CPU kernels under ${raglane_prefix}: Raglane was installed without a C++ compiler")
  return()
endif()
if(NOT TARGET raglane::raglane)
  add_library(raglane::raglane SHARED IMPORTED)
  set_target_properties(raglane::raglane PROPERTIES
    IMPORTED_LOCATION "${raglane_library}"
    IMPORTED_NO_SONAME TRUE
    INTERFACE_INCLUDE_DIRECTORIES "${raglane_prefix}/include")
endif()
