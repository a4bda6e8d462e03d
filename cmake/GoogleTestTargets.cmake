# Defines eagercache_add_test(). GoogleTest itself is found in Dependencies.cmake.
include(GoogleTest)

# GoogleTest's headers and the standard library's larger ones, precompiled for the tests without torch.
set(gtest_headers_source "${CMAKE_CURRENT_BINARY_DIR}/gtest_headers.cc")
if(NOT EXISTS "${gtest_headers_source}")
  file(WRITE "${gtest_headers_source}" "// Nothing: the headers are what this target is for.\n")
endif()
add_library(eagercache_gtest_headers OBJECT EXCLUDE_FROM_ALL "${gtest_headers_source}")
target_link_libraries(eagercache_gtest_headers PRIVATE eagercache_settings GTest::gtest)
target_precompile_headers(eagercache_gtest_headers PRIVATE
  <gtest/gtest.h> <chrono> <filesystem> <fstream> <functional> <map> <string> <thread> <vector>)

# eagercache_add_test(name SOURCES files... LIBS targets... [LABELS ...] [TIMEOUT seconds]
#                     [HEADERS_OF target] [UNITY files] [WHOLE]): one GoogleTest executable. ctest runs each
# of its tests in a process of its own, or, where it is WHOLE, all of them in one: a start of libtorch costs
# more than a test. Its own report, gtest/NAME.json, has them then (scripts/parts/count_tests.py). HEADERS_OF names
# whose precompiled headers it uses; those are of a library, hence -fPIC. UNITY is for eagercache_unity().
function(eagercache_add_test name)
  cmake_parse_arguments(ARG "WHOLE" "TIMEOUT;HEADERS_OF;UNITY" "SOURCES;LIBS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(CMAKE_CROSSCOMPILING)  # under an emulator
    math(EXPR ARG_TIMEOUT "10 * ${ARG_TIMEOUT}")
  endif()
  if(NOT ARG_HEADERS_OF)
    set(ARG_HEADERS_OF eagercache_gtest_headers)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE eagercache_settings ${ARG_LIBS} GTest::gtest GTest::gtest_main)
  target_compile_options(${name} PRIVATE -fPIC)
  target_precompile_headers(${name} REUSE_FROM ${ARG_HEADERS_OF})
  if(ARG_UNITY)
    eagercache_unity(${name} ${ARG_UNITY})
  endif()
  if(ARG_WHOLE)
    add_test(NAME ${name} COMMAND ${name} "--gtest_output=json:${CMAKE_BINARY_DIR}/gtest/${name}.json")
    set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
  else()
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60
      PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
  endif()
endfunction()
