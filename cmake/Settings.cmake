# Language level, warnings, visibility and sanitizers, carried by one INTERFACE target that every
# target of ours links. Nothing is appended to CMAKE_CXX_FLAGS.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()
# The layers without torch are compiled and tested for aarch64, too (scripts/check_aarch64).
set(known_processors x86_64)
if(NOT EAGERCACHE_WITH_TORCH)
  list(APPEND known_processors aarch64)
endif()
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR IN_LIST known_processors)
  message(FATAL_ERROR "eagercache builds on Linux x86-64 only (this is "
                      "${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}); its layers without torch on aarch64, too.")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "eagercache needs g++ 12 or later; ${CMAKE_CXX_COMPILER} is "
                      "${CMAKE_CXX_COMPILER_VERSION}. Set CXX to a newer one.")
endif()

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

add_library(eagercache_settings INTERFACE)
target_compile_features(eagercache_settings INTERFACE cxx_std_20)
target_compile_options(eagercache_settings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -fvisibility=hidden
  $<$<BOOL:${EAGERCACHE_WERROR}>:-Werror>)

# eagercache_unity(target files): under EAGERCACHE_UNITY so many files of the target are compiled at a time.
function(eagercache_unity target files)
  set_target_properties(${target} PROPERTIES
    UNITY_BUILD ${EAGERCACHE_UNITY} UNITY_BUILD_BATCH_SIZE ${files})
endfunction()

if(EAGERCACHE_MUTATIONS)
  target_compile_definitions(eagercache_settings INTERFACE EAGERCACHE_MUTATIONS)
endif()

if(EAGERCACHE_SANITIZE STREQUAL "address")
  set(sanitize_flags -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
elseif(EAGERCACHE_SANITIZE STREQUAL "thread")
  set(sanitize_flags -fsanitize=thread -fno-omit-frame-pointer)
elseif(EAGERCACHE_SANITIZE)
  message(FATAL_ERROR "EAGERCACHE_SANITIZE is '${EAGERCACHE_SANITIZE}'; use address, thread or nothing.")
endif()
if(sanitize_flags)
  target_compile_options(eagercache_settings INTERFACE ${sanitize_flags})
  target_link_options(eagercache_settings INTERFACE ${sanitize_flags})
endif()
