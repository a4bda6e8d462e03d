# GoogleTest: the system's, else its sources under /usr/src, else a copy given with
# FETCHCONTENT_SOURCE_DIR_GOOGLETEST. Defines eagercache_add_test().
include(FetchContent)
include(GoogleTest)

find_package(GTest QUIET)
if(NOT GTest_FOUND)
  if(NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST AND EXISTS /usr/src/googletest/CMakeLists.txt)
    set(FETCHCONTENT_SOURCE_DIR_GOOGLETEST /usr/src/googletest)
  endif()
  if(NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST)
    message(FATAL_ERROR "GoogleTest was not found. Debian and Ubuntu: apt-get install libgtest-dev "
                        "(or pass -DEAGERCACHE_BUILD_TESTS=OFF)")
  endif()
  set(INSTALL_GTEST OFF)
  FetchContent_Declare(googletest)
  FetchContent_MakeAvailable(googletest)
endif()

# eagercache_add_test(NAME sources... LIBS targets...): one GoogleTest executable, each of its tests
# known to ctest.
function(eagercache_add_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LIBS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE eagercache_settings ${ARG_LIBS} GTest::gtest GTest::gtest_main)
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
endfunction()
