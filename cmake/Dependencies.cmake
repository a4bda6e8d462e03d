# The libraries that this build needs beside torch. Each has a Debian package; what is missing is named in
# one message. Where there is a network and no package, EAGERCACHE_FETCH=ON downloads all but OpenSSL: the
# version is pinned and the file's hash is checked.
#
#   OpenSSL's libcrypto   libssl-dev            always; what signs and hashes is the system's to keep up to date
#   nlohmann-json         nlohmann-json3-dev    always
#   GoogleTest            libgtest-dev          EAGERCACHE_BUILD_TESTS
#   Google Benchmark      libbenchmark-dev      EAGERCACHE_BUILD_BENCH
#
# A copy of one's own is named by FETCHCONTENT_SOURCE_DIR_NLOHMANN_JSON, _GOOGLETEST or _BENCHMARK; it goes
# before everything else.
include(FetchContent)

option(EAGERCACHE_FETCH "Download nlohmann-json, GoogleTest and Google Benchmark where they are missing" OFF)

find_package(Threads REQUIRED)
set(missing_libraries "")
set(missing_packages "")

macro(eagercache_missing library package)
  list(APPEND missing_libraries "${library}")
  list(APPEND missing_packages "${package}")
endmacro()

# eagercache_fetch(name library package url sha256): makes `name` available from its sources, or notes
# that it is missing.
macro(eagercache_fetch name library package url sha256)
  string(TOUPPER ${name} upper_name)
  if(FETCHCONTENT_SOURCE_DIR_${upper_name} OR EAGERCACHE_FETCH)
    FetchContent_Declare(${name} URL "${url}" URL_HASH SHA256=${sha256} DOWNLOAD_EXTRACT_TIMESTAMP OFF)
    FetchContent_MakeAvailable(${name})
  else()
    eagercache_missing("${library}" ${package})
  endif()
endmacro()

find_package(OpenSSL 1.1.1 COMPONENTS Crypto)
if(NOT OPENSSL_FOUND)
  eagercache_missing("OpenSSL's libcrypto 1.1.1 or later" libssl-dev)
endif()

if(NOT FETCHCONTENT_SOURCE_DIR_NLOHMANN_JSON)
  find_package(nlohmann_json 3.9 QUIET)
  if(NOT nlohmann_json_FOUND)
    find_path(EAGERCACHE_NLOHMANN_JSON_INCLUDE nlohmann/json.hpp)
    if(EAGERCACHE_NLOHMANN_JSON_INCLUDE)
      add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
      target_include_directories(nlohmann_json::nlohmann_json INTERFACE
        "${EAGERCACHE_NLOHMANN_JSON_INCLUDE}")
    endif()
  endif()
endif()
if(NOT TARGET nlohmann_json::nlohmann_json)
  eagercache_fetch(nlohmann_json "nlohmann-json 3.9 or later" nlohmann-json3-dev
    https://github.com/nlohmann/json/archive/refs/tags/v3.11.2.tar.gz
    d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273)
endif()

if(EAGERCACHE_BUILD_TESTS)
  if(NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST)
    find_package(GTest QUIET)
    if(NOT GTest_FOUND AND EXISTS /usr/src/googletest/CMakeLists.txt)
      set(FETCHCONTENT_SOURCE_DIR_GOOGLETEST /usr/src/googletest)
    endif()
  endif()
  if(NOT TARGET GTest::gtest)
    set(INSTALL_GTEST OFF)
    eagercache_fetch(googletest "GoogleTest (or -DEAGERCACHE_BUILD_TESTS=OFF)" libgtest-dev
      https://github.com/google/googletest/archive/refs/tags/release-1.12.1.tar.gz
      81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2)
  endif()
endif()

if(EAGERCACHE_BUILD_BENCH)
  if(NOT FETCHCONTENT_SOURCE_DIR_BENCHMARK)
    find_package(benchmark QUIET)
  endif()
  if(NOT TARGET benchmark::benchmark)
    set(BENCHMARK_ENABLE_TESTING OFF)
    set(BENCHMARK_ENABLE_INSTALL OFF)
    set(BENCHMARK_ENABLE_WERROR OFF)
    eagercache_fetch(benchmark "Google Benchmark" libbenchmark-dev
      https://github.com/google/benchmark/archive/refs/tags/v1.7.1.tar.gz
      6430e4092653380d9dc4ccb45a1e2dc9259d581f4866dc0759713126056bc1d7)
  endif()
endif()

if(missing_libraries)
  list(JOIN missing_libraries "\n  " missing_libraries)
  list(JOIN missing_packages " " missing_packages)
  message(FATAL_ERROR "These libraries were not found:\n  ${missing_libraries}\n"
    "Debian and Ubuntu: apt-get install ${missing_packages}\n"
    "With a network, -DEAGERCACHE_FETCH=ON downloads all of them but OpenSSL.")
endif()
