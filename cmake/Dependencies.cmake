# Libraries that every build needs. Each has a Debian package; missing ones are named together, with the
# command that installs them. nlohmann-json is header-only and may be fetched.
include(FetchContent)

find_package(Threads REQUIRED)
find_package(OpenSSL 1.1.1 COMPONENTS Crypto)
if(NOT OPENSSL_FOUND)
  message(FATAL_ERROR "OpenSSL's libcrypto headers were not found. Debian and Ubuntu: "
                      "apt-get install libssl-dev")
endif()

# A system copy first; then a copy given with FETCHCONTENT_SOURCE_DIR_NLOHMANN_JSON.
find_package(nlohmann_json 3.9 QUIET)
if(NOT nlohmann_json_FOUND)
  if(NOT FETCHCONTENT_SOURCE_DIR_NLOHMANN_JSON)
    find_path(EAGERCACHE_NLOHMANN_JSON_INCLUDE nlohmann/json.hpp)
    if(NOT EAGERCACHE_NLOHMANN_JSON_INCLUDE)
      message(FATAL_ERROR "nlohmann/json.hpp was not found. Debian and Ubuntu: "
                          "apt-get install nlohmann-json3-dev")
    endif()
    add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
    target_include_directories(nlohmann_json::nlohmann_json INTERFACE
      "${EAGERCACHE_NLOHMANN_JSON_INCLUDE}")
  else()
    FetchContent_Declare(nlohmann_json)
    FetchContent_MakeAvailable(nlohmann_json)
  endif()
endif()
